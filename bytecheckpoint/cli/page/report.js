"use strict";
(async () => {
const $ = id => document.getElementById(id);
const GROUP = 64; // ranks in a row of the first view
const SHOWN_BOXES = 200; // in the table
const ROW = 13; // height of a row of ranks, in pixels
const WAITING = 0.35; // opacity of steps in which ranks wait for each other

const packed = Uint8Array.from(atob($("data").textContent), c => c.charCodeAt(0));
const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
const data = JSON.parse(await new Response(stream).text());
document.body.classList.add("has-scripts");

// -- text -------------------------------------------------------------------------------------------------------------

function bytes(value) {
  if (value < 1024) return `${value} B`;
  const units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
  const unit = Math.min(units.length, Math.floor(Math.log2(value) / 10));
  return `${(value / 1024 ** unit).toFixed(1).replace(/\.0$/, "")} ${units[unit - 1]}`;
}

function seconds(value) {
  if (value < 1) return `${Number((value * 1000).toPrecision(3))} ms`;
  return value < 120 ? `${Number(value.toPrecision(3))} s` : `${(value / 60).toFixed(1)} min`;
}

const count = value => value.toLocaleString("en");

// -- charts -----------------------------------------------------------------------------------------------------------

const COLORS = {
  check: "#7d8996", open: "#b58a5a", describe: "#2fa58a", agree: "#c678b4", plan: "#9a7fd1", stage: "#e69f00",
  merge: "#d9662b", write: "#4c8be0", read: "#4c8be0", confirm: "#5fb4a0", commit: "#c0504d", apply: "#e69f00",
};
const OTHER_COLORS = ["#b07aa1", "#59a14f", "#9c755f", "#edc948", "#76b7b2"];
const colorOf = (step, at) => COLORS[step] ?? OTHER_COLORS[at % OTHER_COLORS.length];
const charts = new Map(); // by the element's id: the chart, and the function that returns its options

function look() {
  const style = getComputedStyle(document.documentElement);
  return name => style.getPropertyValue(`--${name}`).trim();
}

function axis(color) {
  return {
    axisLine: { lineStyle: { color: color("line") } },
    axisLabel: { color: color("muted") },
    nameTextStyle: { color: color("muted") },
    splitLine: { lineStyle: { color: color("line") } },
    axisTick: { show: false },
  };
}

function draw(id, options, height) {
  const element = $(id);
  if (height) element.style.height = `${height}px`;
  let one = charts.get(id);
  if (!one) {
    one = { chart: echarts.init(element), options };
    charts.set(id, one);
  }
  one.options = options;
  const color = look();
  one.chart.resize();
  one.chart.setOption({
    animation: false,
    textStyle: { fontFamily: "system-ui, sans-serif" },
    aria: { enabled: true },
    ...options(color),
    tooltip: {
      renderMode: "richText", confine: true, backgroundColor: color("card"), borderColor: color("line"),
      textStyle: { color: color("text"), fontSize: 13 }, ...options(color).tooltip,
    },
  }, { notMerge: true });
  return one.chart;
}

function redraw() {
  for (const [id, one] of charts) if (one.chart.getWidth()) draw(id, one.options);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let width = document.body.clientWidth;
addEventListener("resize", () => {
  if (document.body.clientWidth !== width) requestAnimationFrame(redraw);
  width = document.body.clientWidth;
});

// -- checkpoints ------------------------------------------------------------------------------------------------------

const saved = data.checkpoints.filter(one => one.status === "checkpoint");

/** The distance of the labels of an axis, so that they are round numbers of KiB, MiB, ... */
const binary = most => 2 ** Math.ceil(Math.log2(Math.max(most, 1) / 5));

function overTime(color, unit, interval, series) {
  return {
    grid: { left: 8, right: 12, top: 34, bottom: saved.length > 40 ? 46 : 8, containLabel: true },
    legend: { top: 0, left: 0, textStyle: { color: color("text") }, itemWidth: 14, itemHeight: 10 },
    xAxis: { type: "category", data: saved.map(one => one.step === null ? one.name : count(one.step)), ...axis(color) },
    yAxis: { type: "value", interval, max: interval && (({ max }) => interval * Math.ceil(max / interval)), ...axis(color), axisLabel: { color: color("muted"), formatter: unit } },
    dataZoom: saved.length > 40 ? [{ type: "slider", height: 18, bottom: 8, textStyle: { color: color("muted") } }] : [],
    tooltip: { trigger: "axis", valueFormatter: value => value === undefined || value === null ? "unknown" : unit(value) },
    series,
  };
}

function drawCheckpoints() {
  const parts = [["written", "bytes"], ["shared with an older one", "shared_bytes"]].filter(([, key]) => saved.some(one => one[key]));
  draw("size-chart", color => overTime(color, bytes, binary(Math.max(...saved.map(one => one.bytes + one.shared_bytes))), parts.map(([name, key]) => (
    { name, type: "bar", stack: "size", barMaxWidth: 40, itemStyle: { color: color(key === "bytes" ? "written" : "shared") }, data: saved.map(one => one[key]) }
  ))));
  draw("time-chart", color => overTime(color, seconds, undefined, [
    { name: "until the commit", type: "line", symbolSize: 6, itemStyle: { color: color("written") }, data: saved.map(one => one.seconds) },
    { name: "training waited", type: "line", symbolSize: 6, itemStyle: { color: color("slow") }, data: saved.map(one => one.stall) },
    ...data.floor ? [{ name: "at this machine's rate", type: "line", symbol: "none", lineStyle: { type: "dashed" }, itemStyle: { color: color("muted") }, data: saved.map(one => one.bytes / data.floor.write) }] : [],
  ]));
}

// -- operations -------------------------------------------------------------------------------------------------------

let operation, steps, groupSize;

function median(values) {
  const sorted = values.filter(value => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

function selectOperation() {
  operation = data.operations[$("operation").value];
  steps = Object.keys(operation.seconds);
  operation.medians ??= steps.map(step => median(operation.seconds[step]));
  groupSize = operation.ranks > GROUP ? GROUP * Math.ceil(operation.ranks / GROUP ** 2) : 1;
  const groups = $("group");
  groups.replaceChildren();
  if (groupSize === 1) groups.add(new Option("all ranks", "-1"));
  else {
    groups.add(new Option(`all ranks, in groups of ${groupSize}`, "-1"));
    for (let first = 0; first < operation.ranks; first += groupSize) groups.add(new Option(rowTitle(ranksFrom(first)), first));
  }
  $("measure").options[2].disabled = !Object.keys(operation.bytes).length;
  if ($("measure").options[2].disabled && $("measure").value === "bytes") $("measure").value = "seconds";
  document.querySelectorAll(".tables").forEach((one, at) => { one.hidden = at !== Number($("operation").value); });
  drawOperation();
}

function ranksFrom(first) {
  const last = Math.min(first + groupSize, operation.ranks);
  return Array.from({ length: last - first }, (_, at) => first + at);
}

function rows() {
  const first = Number($("group").value);
  if (first >= 0) return ranksFrom(first).map(rank => [rank]);
  return Array.from({ length: Math.ceil(operation.ranks / groupSize) }, (_, at) => ranksFrom(at * groupSize));
}

const rowName = ranks => ranks.length === 1 ? String(ranks[0]) : `${ranks[0]}-${ranks.at(-1)}`;
const rowTitle = ranks => `${ranks.length === 1 ? "rank" : "ranks"} ${rowName(ranks)}`;

function hostName(rank) {
  const host = operation.hosts[rank];
  return host ? ` on ${host}` : "";
}

/** The columns of the heat map: the steps, and for bytes also where those of a load came from. */
const columns = () => $("measure").value === "bytes" ? [...steps, ...Object.keys(operation.sources).map(source => `from ${source}`)] : steps;

/** The value that decides the color, of a rank in a column; null if it has none. */
function measured(rank, at) {
  const measure = $("measure").value;
  if (measure === "bytes") return (operation.bytes[steps[at]] ?? Object.values(operation.sources)[at - steps.length])?.[rank] ?? null;
  const value = operation.seconds[steps[at]][rank];
  return value === null || measure === "seconds" ? value : Math.max(0, value - operation.medians[at]);
}

/** The rank of a row that took longest in the steps in which it does not wait for others. */
function slowestOf(ranks) {
  let found = ranks[0], most = -1;
  for (const rank of ranks) {
    const total = steps.reduce((sum, step) => sum + (operation.waits.includes(step) ? 0 : operation.seconds[step][rank] ?? 0), 0);
    if (total > most) [found, most] = [rank, total];
  }
  return found;
}

function drawOperation() {
  const shown = rows(), isGrouped = shown.some(ranks => ranks.length > 1);
  const names = shown.map(rowName), unit = $("measure").value === "bytes" ? bytes : seconds;
  const height = Math.max(180, shown.length * (shown.length > 16 ? ROW : 22) + 90);
  const cells = [], bars = [], titles = columns();
  shown.forEach((ranks, row) => {
    titles.forEach((_, at) => {
      let most = null, rank = ranks[0];
      for (const one of ranks) {
        const value = measured(one, at);
        if (value !== null && (most === null || value > most)) [most, rank] = [value, one];
      }
      if (most !== null) cells.push({ value: [at, row, most, rank], itemStyle: { opacity: operation.waits.includes(steps[at]) ? WAITING : 1 } });
    });
    const rank = slowestOf(ranks);
    let end = 0;
    steps.forEach((step, at) => {
      const took = operation.seconds[step][rank], begin = operation.begin[step]?.[rank] ?? end;
      if (took === null) return;
      bars.push([row, at, begin, begin + took, rank]);
      end = begin + took;
    });
  });
  const hasTrace = Object.keys(operation.begin).length > 0;
  $("timeline-title").textContent = hasTrace ? "Timeline" : "Steps, end to end";
  $("operation-note").textContent = [
    isGrouped ? "Each row is a group of ranks: the longest of each step, and the steps of its slowest rank. Select a row to see its ranks." : "",
    hasTrace ? "" : "Stored with the checkpoint: a trace also shows when each step ran.",
  ].join(" ").trim();
  const yAxis = color => ({
    type: "category", data: names, inverse: true, ...axis(color), splitLine: { show: false },
    axisLabel: { color: color("muted"), fontSize: 11 },
  });
  const open = event => {
    if (isGrouped && event.value) {
      $("group").value = String(shown[event.value[event.seriesType === "custom" ? 0 : 1]][0]);
      drawOperation();
    }
  };
  const isNarrow = $("heat-chart").clientWidth < 80 + 58 * titles.length, top = isNarrow ? 60 : 30;
  const most = Math.max(...cells.filter(cell => cell.itemStyle.opacity === 1).map(cell => cell.value[2]), 1e-9);
  const heat = draw("heat-chart", color => ({
    grid: { left: 70, right: isNarrow ? 28 : 12, top, bottom: 62 },
    xAxis: { type: "category", data: titles, position: "top", ...axis(color), axisLabel: { color: color("muted"), interval: 0, fontSize: 11, rotate: isNarrow ? 45 : 0 } },
    yAxis: yAxis(color),
    visualMap: {
      min: 0, max: most, calculable: false, orient: "horizontal", left: "center", bottom: 0, itemHeight: 140, itemWidth: 12,
      text: [unit(most), "0"], textStyle: { color: color("muted") }, dimension: 2,
      inRange: { color: [color("heat-low"), color("heat-mid"), color("heat-high")] },
    },
    tooltip: { formatter: ({ value: [at, row, value, rank] }) => {
      const took = operation.seconds[steps[at]]?.[rank], time = took === undefined ? "" : `\n${seconds(took)}, median ${seconds(operation.medians[at])}`;
      return `${rowTitle(shown[row])}: ${titles[at]}\n${unit(value)}${isGrouped ? ` in rank ${rank}, the most` : ""}${hostName(rank)}${time}`;
    } },
    series: [{ type: "heatmap", progressive: 0, data: cells, itemStyle: { borderColor: color("card"), borderWidth: 1 }, emphasis: { itemStyle: { borderColor: color("text") } } }],
  }), height);
  const timeline = draw("timeline-chart", color => ({
    grid: { left: 70, right: 20, top, bottom: 62 },
    xAxis: { type: "value", ...axis(color), axisLabel: { color: color("muted"), formatter: seconds, hideOverlap: true } },
    yAxis: yAxis(color),
    legend: { show: false },
    dataZoom: [{ type: "slider", height: 16, bottom: 4, textStyle: { color: color("muted") }, labelFormatter: seconds }, { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true }],
    tooltip: { formatter: ({ value: [row, at, begin, end, rank] }) => `${isGrouped ? `rank ${rank}, the slowest of ${names[row]}` : `rank ${rank}`}${hostName(rank)}\n${steps[at]}: ${seconds(end - begin)}${hasTrace ? `, from ${seconds(begin)} on` : ""}` },
    series: [{
      type: "custom", progressive: 0, data: bars, encode: { x: [2, 3], y: 0 }, clip: true,
      renderItem: (params, api) => {
        const [x, y] = api.coord([api.value(2), api.value(0)]), height = Math.max(3, api.size([0, 1])[1] * 0.74);
        const right = api.coord([api.value(3), 0])[0], { x: left, width } = params.coordSys;
        const from = Math.max(x, left), to = Math.min(Math.max(right, x + 1), left + width);
        if (to <= from) return null;
        return { type: "rect", shape: { x: from, y: y - height / 2, width: to - from, height }, style: { fill: colorOf(steps[api.value(1)], api.value(1)), opacity: operation.waits.includes(steps[api.value(1)]) ? WAITING : 1 } };
      },
    }],
  }), height);
  for (const chart of [heat, timeline]) {
    chart.off("click");
    chart.on("click", open);
  }
  const key = $("legend");
  key.replaceChildren(...steps.map((step, at) => {
    const item = document.createElement("li");
    item.textContent = operation.waits.includes(step) ? `${step} (waits)` : step;
    if (operation.waits.includes(step)) item.className = "waits";
    item.style.setProperty("--color", colorOf(step, at));
    return item;
  }));
}

// -- layout -----------------------------------------------------------------------------------------------------------

const tensors = new Map();

function drawTensor() {
  const tensor = tensors.get($("tensor").value), layout = data.layout;
  if (!tensor) return;
  const ndim = tensor.shape.length, boxes = [];
  for (let at = 0; at < tensor.boxes; at++) {
    const from = tensor.coordinate + at * ndim, file = layout.file[tensor.first + at];
    boxes.push({
      offsets: layout.offsets.slice(from, from + ndim), lengths: layout.lengths.slice(from, from + ndim),
      file: layout.files[file], rank: layout.file_ranks[file],
    });
  }
  const ranks = new Set(boxes.map(box => box.rank)), files = new Set(boxes.map(box => box.file));
  $("tensor-note").textContent = `${tensor.dtype}, shape ${tensor.shape.join(" x ") || "()"}, ${bytes(tensor.bytes)}: `
    + `${count(boxes.length)} box${boxes.length > 1 ? "es" : ""} in ${count(files.size)} file${files.size > 1 ? "s" : ""} of ${count(ranks.size)} rank${ranks.size > 1 ? "s" : ""}.`
    + (ndim > 2 ? " The picture shows the first two dimensions." : "");
  const size = at => tensor.shape[at] ?? 1, order = [...ranks].sort((a, b) => a - b), place = new Map(order.map((rank, at) => [rank, at]));
  const range = (box, at) => at < ndim ? [box.offsets[at], box.offsets[at] + box.lengths[at]] : [0, 1];
  const text = box => `[${box.offsets.map((offset, at) => `${offset}:${offset + box.lengths[at]}`).join(", ")}]`;
  draw("box-chart", color => ({
    grid: { left: 8, right: 24, top: 24, bottom: 8, containLabel: true },
    xAxis: { type: "value", min: 0, max: size(1), position: "top", ...axis(color), splitLine: { show: false }, axisLabel: { color: color("muted"), hideOverlap: true, showMaxLabel: true } },
    yAxis: { type: "value", min: 0, max: size(0), inverse: true, ...axis(color), splitLine: { show: false }, axisLabel: { color: color("muted"), showMaxLabel: true } },
    tooltip: { formatter: ({ dataIndex }) => `${text(boxes[dataIndex])}\nrank ${boxes[dataIndex].rank}\n${boxes[dataIndex].file}` },
    series: [{
      type: "custom", progressive: 0, data: boxes.map(box => [...range(box, 1), ...range(box, 0)]), encode: { x: [0, 1], y: [2, 3] },
      renderItem: (params, api) => {
        const [x, y] = api.coord([api.value(0), api.value(2)]), [right, bottom] = api.coord([api.value(1), api.value(3)]);
        const share = order.length > 1 ? place.get(boxes[params.dataIndex].rank) / (order.length - 1) : 0;
        const isFine = bottom - y < 4 || right - x < 4;
        return {
          type: "rect", shape: { x, y, width: right - x, height: bottom - y },
          style: { fill: `hsl(${Math.round(215 - 195 * share)} 55% 55%)`, stroke: color("card"), lineWidth: isFine ? 0 : 1 },
        };
      },
    }],
  }), ndim < 2 || size(0) === 1 ? 160 : 320);
  const table = $("boxes"), head = table.createTHead(), body = document.createElement("tbody");
  head.replaceChildren();
  const titles = head.insertRow();
  for (const [title, isNumber] of [["Box", false], ["Rank", true], ["File", false]]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = title;
    if (isNumber) cell.className = "n";
    titles.append(cell);
  }
  for (const box of boxes.slice(0, SHOWN_BOXES)) {
    const row = body.insertRow();
    for (const [value, isNumber] of [[text(box), false], [box.rank, true], [box.file, false]]) {
      const cell = row.insertCell();
      cell.textContent = value;
      if (isNumber) cell.className = "n";
    }
  }
  if (boxes.length > SHOWN_BOXES) body.insertRow().insertCell().textContent = `and ${count(boxes.length - SHOWN_BOXES)} more`;
  for (const old of [...table.tBodies]) old.remove();
  table.append(body);
}

function listTensors() {
  let first = 0, coordinate = 0;
  for (const tensor of data.layout.tensors) {
    tensors.set(tensor.name, { ...tensor, first, coordinate });
    first += tensor.boxes;
    coordinate += tensor.boxes * tensor.shape.length;
    const option = document.createElement("option");
    option.value = tensor.name;
    $("tensors").append(option);
  }
  const largest = data.layout.tensors.reduce((a, b) => b.bytes > a.bytes ? b : a);
  $("tensor").value = largest.name;
  drawTensor();
}

// -- the page ---------------------------------------------------------------------------------------------------------

$("checkpoints").hidden = !data.checkpoints.length;
$("operations").hidden = !data.operations.length;
$("layout").hidden = !data.layout?.tensors.length;
if (saved.length) drawCheckpoints();
else document.querySelector(".pair").hidden = true;
if (data.operations.length) {
  data.operations.forEach((one, at) => $("operation").add(new Option(`${one.kind} of ${one.name}`, at)));
  $("operation").addEventListener("change", selectOperation);
  $("group").addEventListener("change", drawOperation);
  $("measure").addEventListener("change", drawOperation);
  selectOperation();
}
if (data.layout?.tensors.length) {
  $("tensor").addEventListener("change", drawTensor);
  listTensors();
}
document.body.dataset.ready = "true";
})();
