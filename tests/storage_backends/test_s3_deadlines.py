"""Saves and loads on an S3 store that fails: each ends by its deadline, and everything that remains is shown.

Each case ends in success or in one error, within two seconds after ``deadline_s``. The checkpoint from before is intact
then, and ``bcp clean --dry-run`` shows every upload that the server itself lists.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("s3fs")

from s3_faults import Exchange, FaultProxy, fault_proxy
from sorted_arguments import saving

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.reshard import reshard
from bytecheckpoint.errors import BytecheckpointError, CheckpointNotFoundError, StorageError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.storage_backends.remote import parts
from bytecheckpoint.testing import time_limit

pytestmark = [pytest.mark.s3, pytest.mark.sampled(7, of=__name__)]

_DEADLINE_S = 2.0
_AFTER_S = 2.0
_ELEMENTS = 3 << 20  # three parts of the smallest size


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((_ELEMENTS,), float(step))}, "extra_state": {"step": step}}


@dataclass
class Faults:
    """Runs operations on ``url`` through ``proxy``, and checks what remains without it."""

    proxy: FaultProxy
    url: str
    direct: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def deadline_s(self) -> float:
        return time_limit(_DEADLINE_S)

    def save(self) -> object:
        return bcp.save(
            self.url,
            _state(2),
            step=2,
            storage_options=self.options,
            options=bcp.SaveOptions(deadline_s=self.deadline_s),
        )

    def load(self) -> object:
        state = _state(0)
        bcp.load(self.url, state, storage_options=self.options, options=bcp.LoadOptions(deadline_s=self.deadline_s))
        assert torch.equal(state["model"]["w"], _state(1)["model"]["w"])
        return state

    @contextmanager
    def endured(self) -> Iterator[None]:
        """The block makes one call that fails or succeeds: check when it ends, and what it leaves behind."""
        begun = time.monotonic()
        yield
        took = time.monotonic() - begun
        # On a busy machine all processes take turns, and so does the server.
        after_s = time_limit(_AFTER_S) * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        assert took <= self.deadline_s + after_s, f"{took:.1f} s, deadline_s was {self.deadline_s:.1f}"
        self.proxy.rule = lambda exchange: None
        self.check_what_remains()

    def run(self, call: Callable[[], object]) -> str:
        """Return the error of a call that ``endured`` checks; empty if it succeeds."""
        failure = ""
        with self.endured():
            try:
                call()
            except BytecheckpointError as error:
                failure = str(error)
                assert failure
        self.is_saved = not failure and call == self.save
        assert bcp.open(self.url, storage_options=self.direct).step == (2 if self.is_saved else 1)
        return failure

    def check_what_remains(self) -> None:
        checkpoint = bcp.open(self.url, storage_options=self.direct)
        state = _state(0)
        bcp.load(self.url, state, storage_options=self.direct)
        assert state["extra_state"]["step"] == checkpoint.step
        assert torch.equal(state["model"]["w"], _state(int(checkpoint.step or 0))["model"]["w"])
        bucket = self.url.split("/")[2]
        there = fsspec.filesystem("s3", **self.direct, skip_instance_cache=True).list_multipart_uploads(bucket)
        options = [text for name, value in self.direct.items() for text in ("-o", f"{name}={value}")]
        shown = CliRunner().invoke(
            cli, ["clean", "--dry-run", "--older-than", "0", "--json", f"s3://{bucket}", *options]
        )
        assert shown.exit_code == 0, shown.output
        found = {(one["key"], one["upload_id"]) for one in json.loads(shown.stdout)["uploads"]}
        assert found == {(one["Key"], one["UploadId"]) for one in there}


@pytest.fixture
def faults(s3: dict[str, Any], bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.setattr(parts, "PART_BYTES", 5 << 20)
    url = f"s3://{bucket}/runs/step-1"
    bcp.save(url, _state(1), step=1, storage_options=s3)
    with fault_proxy(s3["endpoint_url"]) as proxy:
        options = {**s3, "endpoint_url": proxy.url}
        bcp.save(
            f"s3://{bucket}/other", {"extra_state": {}}, storage_options=options
        )  # the store's rules are known now
        proxy.kinds.clear()
        yield Faults(proxy, url, s3, options)


Rule = Callable[[Exchange], str | None]


def _of(kind: str, what: str, *, times: int = 1 << 30) -> Rule:
    return lambda exchange: what if exchange.kind == kind and exchange.number <= times else None


def _after(kind: str, what: str) -> Rule:
    """From the reply to the first request of this kind on."""
    begun: list[Exchange] = []

    def rule(exchange: Exchange) -> str | None:
        if begun:
            return what
        if exchange.kind == kind:
            begun.append(exchange)
        return None

    return rule


def _manifest(what: str, times: int = 1 << 30) -> Rule:
    seen: list[Exchange] = []

    def rule(exchange: Exchange) -> str | None:
        if exchange.kind != "put" or not exchange.path.endswith("manifest.msgpack") or len(seen) >= times:
            return None
        seen.append(exchange)
        return what

    return rule


def _from_manifest(what: str) -> Rule:
    """From the first put of a manifest on."""
    is_put, begun = _manifest(what, 1), []

    def rule(exchange: Exchange) -> str | None:
        if is_put(exchange) is not None:
            begun.append(exchange)
        return what if begun else None

    return rule


def _every(nth: int, what: str) -> Callable[[], Rule]:
    def make() -> Rule:
        count = iter(range(1 << 30))
        return lambda exchange: what if next(count) % nth == nth - 1 else None

    return make


def _one_part(what: str) -> Rule:
    return lambda exchange: what if exchange.part == 2 else None


_SAVES: dict[str, tuple[Callable[[], Rule], str]] = {
    "503 on 20 %": (_every(5, "refuse"), ""),
    "503 on one part": (lambda: _one_part("refuse"), "SlowDown"),
    "503 on everything": (lambda: lambda exchange: "refuse", "SlowDown|Bad status line"),
    "resets within a body": (lambda: _one_part("reset"), "part 2"),
    "one reset": (lambda: _of("part", "reset", times=1), ""),
    "a part that is not read": (lambda: _one_part("deaf"), "did not answer"),
    "a part without reply": (lambda: _one_part("stall"), "did not answer"),
    "a reply that stops": (lambda: _of("begin", "hang"), "did not answer"),
    "nothing after begin": (lambda: _after("begin", "stall"), "did not answer"),
    "nothing at all": (lambda: lambda exchange: "stall", "did not answer"),
    "a lost reply to Complete": (lambda: _of("complete", "lose", times=1), ""),
    "every reply to Complete lost": (lambda: _of("complete", "lose"), "Connection was closed|closed connection"),
    "a lost reply to the manifest": (lambda: _manifest("lose", 1), ""),
    "a token that expires": (lambda: _after("part", "expired"), "credentials have expired"),
    "clock skew": (lambda: lambda exchange: "skewed", "clock of this machine differs"),
    "another region": (lambda: lambda exchange: "elsewhere", "in another region"),
    "a region without a name": (lambda: lambda exchange: "nowhere", "in another region"),
    "nothing from the commit on": (lambda: _from_manifest("stall"), "reading it back failed too"),
    "a manifest that is refused": (lambda: _manifest("refuse"), "SlowDown"),
}


@pytest.mark.parametrize("case", _SAVES)
@pytest.mark.sampled(4)
def test_a_save(faults: Faults, case: str) -> None:
    make, error = _SAVES[case]
    faults.proxy.rule = make()
    failure = faults.run(faults.save)
    if not error:
        assert failure == ""
    else:
        assert any(text in failure for text in error.split("|")), failure


def _once(rule: Rule) -> Rule:
    """Only the first fault of a rule."""
    found: list[str] = []

    def first(exchange: Exchange) -> str | None:
        what = None if found else rule(exchange)
        found.extend([what] if what else [])
        return what

    return first


def _file(what: str) -> Rule:
    return lambda exchange: what if exchange.path.endswith(".safetensors") else None


def _ranged(what: str) -> Rule:
    """Of the reads of tensors but the last one, which ends with the file."""
    return lambda exchange: what if exchange.kind == "get" and exchange.start == 4096 else None


def _data(what: str) -> Rule:
    """Of the reads of tensors, not of headers and values."""
    return lambda exchange: what if exchange.kind == "get" and exchange.start else None


_LOADS: dict[str, tuple[Callable[[], Rule], str]] = {
    "503 on 20 %": (_every(5, "refuse"), ""),
    "resets": (lambda: _of("get", "reset", times=3), ""),
    "a reply that stops": (lambda: _after("get", "hang"), "did not answer"),
    "503 after the manifest": (lambda: _after("get", "refuse"), "SlowDown"),
    "nothing after the manifest": (lambda: _after("get", "stall"), "did not answer"),
    "replies that are too short": (lambda: _after("get", "cut"), "reading"),
    "a token that expires": (lambda: _after("get", "expired"), "credentials have expired"),
    "clock skew": (lambda: lambda exchange: "skewed", "clock of this machine differs"),
    "another region": (lambda: lambda exchange: "elsewhere", "in another region"),
    "a region without a name": (lambda: lambda exchange: "nowhere", "in another region"),
    "a reply that is too long": (lambda: _once(_ranged("longer")), ""),
    "replies that are too long": (lambda: _ranged("longer"), "the reply has [4096, "),
    "one wrong byte of a tensor": (lambda: _once(_data("flip")), ""),
    "one wrong byte of a header": (lambda: _once(_file("flip")), ""),
    "wrong bytes of tensors": (lambda: _data("flip"), "checksum mismatch"),
    "tensors without reply": (lambda: _data("stall"), "cannot read bytes"),
    "tensors whose replies stop": (lambda: _data("hang"), "cannot read bytes"),
    "tensors whose replies are too short": (lambda: _data("cut"), "cannot read bytes"),
}


@pytest.mark.parametrize("case", _LOADS)
@pytest.mark.sampled(3)
def test_a_load(faults: Faults, case: str) -> None:
    make, error = _LOADS[case]
    faults.proxy.rule = make()
    failure = faults.run(faults.load)
    assert error in failure, failure
    assert bool(error) is bool(failure)
    if case not in ("a token that expires", "clock skew", "another region", "a region without a name"):
        # To ask a silent store why it is silent would take as long again.
        assert "head" not in faults.proxy.kinds


def test_one_wrong_byte_of_encoded_tensors(faults: Faults) -> None:
    url = faults.url + "-encoded"
    bcp.save(url, _state(1), storage_options=faults.direct, options=bcp.SaveOptions(codec="zstd"))
    faults.proxy.rule = _once(_data("flip"))
    state = _state(0)
    bcp.load(url, state, storage_options=faults.options)
    assert torch.equal(state["model"]["w"], _state(1)["model"]["w"])


def test_one_wrong_byte_of_a_checkpoint_that_is_rewritten(faults: Faults, tmp_path: Path) -> None:
    """Conversions fetch shards unchanged."""
    faults.proxy.rule = _once(_data("flip"))
    reshard(bcp.open(faults.url, storage_options=faults.options), str(tmp_path / "to"), files=1)
    assert torch.equal(bcp.open(tmp_path / "to")["model.w"].load(), _state(1)["model"]["w"])


@pytest.mark.parametrize("what", ["stall", "hang"])
@pytest.mark.sampled(1)
def test_a_load_of_encoded_tensors(faults: Faults, what: str) -> None:
    url = faults.url + "-encoded"
    bcp.save(url, _state(1), storage_options=faults.direct, options=bcp.SaveOptions(codec="zstd"))
    faults.proxy.rule = _data(what)
    call = partial(
        bcp.load, url, _state(0), storage_options=faults.options, options=bcp.LoadOptions(deadline_s=faults.deadline_s)
    )
    assert "did not answer" in faults.run(call)
    assert "head" not in faults.proxy.kinds


@pytest.mark.parametrize("case", ["closed port", "no such bucket", "no credentials"])
@pytest.mark.sampled(1)
def test_a_wrong_address(faults: Faults, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    options, url = dict(faults.options), faults.url
    if case == "closed port":
        options["endpoint_url"] = "http://127.0.0.1:1"
    elif case == "no such bucket":
        url = "s3://none-of-this-name/x"
    else:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/does/not/exist")
        options = {"endpoint_url": options["endpoint_url"]}
    expected = {"closed port": "127.0.0.1:1", "no such bucket": "bucket", "no credentials": "no credentials were found"}
    calls: list[Callable[[], object]] = [
        lambda: bcp.save(
            url, _state(2), storage_options=options, options=bcp.SaveOptions(deadline_s=faults.deadline_s)
        ),
        lambda: bcp.load(
            url, _state(0), storage_options=options, options=bcp.LoadOptions(deadline_s=faults.deadline_s)
        ),
    ]
    for call in calls:
        assert expected[case] in faults.run(call)


def test_thousands_of_keys(faults: Faults) -> None:
    """Each listing of ``latest`` and ``ls`` has several pages, of one object here."""
    root = faults.url.rpartition("/")[0]
    for step in (2, 3, 10):
        bcp.save(f"{root}/step-{step}", {"extra_state": {"step": step}}, step=step, storage_options=faults.direct)
    faults.proxy.rule = lambda exchange: "pages" if exchange.kind == "list" else None
    newest = bcp.latest(root, storage_options=faults.options)
    assert newest is not None
    assert newest.step == 10
    assert faults.proxy.kinds.count("list") > 4, "one page for each checkpoint"
    options = [text for name, value in faults.options.items() for text in ("-o", f"{name}={value}")]
    shown = CliRunner().invoke(cli, ["ls", "--json", root, *options])
    assert shown.exit_code == 0, shown.output
    assert [one["step"] for one in json.loads(shown.stdout)["entries"]] == [1, 2, 3, 10]


def test_a_search_that_ends_between_two_pages(faults: Faults) -> None:
    root = faults.url.rpartition("/")[0]
    bcp.save(f"{root}/step-2", {"extra_state": {}}, step=2, storage_options=faults.direct)
    faults.proxy.rule = lambda exchange: {"list": "pages" if exchange.number == 1 else "stall"}.get(exchange.kind)
    with faults.endured(), pytest.raises(StorageError, match="did not answer"):
        bcp.latest(root, storage_options=faults.options, deadline_s=faults.deadline_s)


def test_uploads_that_killed_processes_left_are_removed_by_no_save(faults: Faults) -> None:
    """They are shown as long as they exist; the save of another attempt does not touch them."""
    fs = fsspec.filesystem("s3", **faults.direct)
    bucket, _, key = faults.url.removeprefix("s3://").partition("/")
    fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{key}/attempt-1/model")
    assert faults.run(faults.save) == ""
    assert len(fs.list_multipart_uploads(bucket)) == 1


def test_the_first_save_to_a_path(faults: Faults) -> None:
    """There is no checkpoint from before: after the error, there is none."""
    faults.proxy.rule = _after("begin", "stall")
    url = faults.url + "-new"
    call = partial(
        bcp.save, url, _state(2), storage_options=faults.options, options=bcp.SaveOptions(deadline_s=faults.deadline_s)
    )
    assert "did not answer" in faults.run(call)
    with pytest.raises((CheckpointNotFoundError, bcp.errors.NotACheckpointError)):
        bcp.open(url, storage_options=faults.direct)


@dataclass
class Incremental:
    """Saves of four tensors, each of which is changed by another one: the base has files in four folders."""

    faults: Faults

    def __post_init__(self) -> None:
        self.root = self.faults.url.rpartition("/")[0] + "/incremental"
        self.tensors = {str(index): torch.zeros(4096) for index in range(4)}
        for step in range(4):
            self.save(step, self.faults.direct)
        self.forget()
        self.faults.proxy.kinds.clear()

    @staticmethod
    def forget() -> None:
        """As in a new process, which does not know the newest checkpoint."""
        session_of().engine.shared.last_commit = None

    def save(self, step: int, options: dict[str, Any], **others: Any) -> object:
        self.tensors[str(step % 4)].fill_(step + 1)
        state = {"tree": self.tensors}
        return bcp.save(
            f"{self.root}/step-{step}", state, storage_options=options, **saving(base="auto", chunk_size=1024, **others)
        )

    def run(self) -> str:
        """Return the error of one more save, after which the checkpoints from before are intact."""
        faults = self.faults
        failure = faults.run(lambda: self.save(4, faults.options, deadline_s=faults.deadline_s))
        newest = bcp.latest(self.root, storage_options=faults.direct)
        assert newest is not None
        assert newest.step is None
        assert newest.url.endswith("step-3") == bool(failure)
        assert newest.verify().ok
        return failure


def test_an_incremental_save_whose_base_gets_no_reply_is_not_complete(faults: Faults) -> None:
    """Whether the newest checkpoint is still there is unknown then; to look for another one would take as long."""
    saves = Incremental(faults)
    saves.save(3, faults.options)
    faults.proxy.kinds.clear()
    faults.proxy.rule = lambda exchange: "stall" if exchange.kind == "get" and exchange.start else None
    assert "did not answer" in saves.run()
    assert "put" not in faults.proxy.kinds, "no file"
    assert faults.proxy.kinds.count("list") <= 1, "for the removal of the attempt"


def test_an_incremental_save_that_ends_in_a_silent_store(faults: Faults) -> None:
    """It is committed. To remove what it replaced is given up with the first request that gets no reply."""
    saves = Incremental(faults)
    saves.save(4, faults.direct)
    faults.proxy.kinds.clear()
    before: list[int] = []  # the requests until the commit
    faults.proxy.rule = lambda exchange: "stall" if before else None

    def observe(name: str, event: str) -> None:
        if name == "save.commit.after":
            before.append(len(faults.proxy.kinds))

    stop = telemetry.observe(observe)
    try:
        assert saves.run() == ""
    finally:
        stop()
    assert set(faults.proxy.kinds[before[0] :]) == {"get"}, "only the lease, perhaps repeatedly"


@pytest.mark.parametrize("what", ["latest", "best", "milestone", "resume", "save"])
@pytest.mark.sampled(2)
def test_a_search_below_a_root(faults: Faults, what: str) -> None:
    root = faults.url.rpartition("/")[0]
    Incremental.forget()
    manager = bcp.CheckpointManager(
        root,
        cadence=1,
        async_save=False,
        storage_options=faults.options,
        save=bcp.SaveOptions(base="auto"),
        job=bcp.JobOptions(deadline_s=faults.deadline_s, lease_s=time_limit(60)),
    )
    calls: dict[str, Callable[[], object]] = {
        "latest": manager.latest,
        "best": lambda: manager.best("loss", "min"),
        "milestone": lambda: manager.milestone("x"),
        "resume": lambda: manager.resume(_state(0)),
        "save": lambda: manager.save(2, _state(2)),
    }
    faults.proxy.rule = lambda exchange: "stall" if exchange.kind == "list" else None
    try:
        assert "did not answer" in faults.run(calls[what])
    finally:
        manager.close()


@pytest.mark.parametrize("what", ["latest", "open"])
@pytest.mark.sampled(1)
def test_a_checkpoint_that_is_only_looked_at(faults: Faults, what: str) -> None:
    url, options, deadline_s = faults.url, faults.options, faults.deadline_s
    calls: dict[str, Callable[[], object]] = {
        "latest": lambda: bcp.latest(url, storage_options=options, deadline_s=deadline_s),
        "open": lambda: bcp.open(url, storage_options=options, options=bcp.LoadOptions(deadline_s=deadline_s)),
    }
    faults.proxy.rule = lambda exchange: "stall"
    assert "did not answer" in faults.run(calls[what])


def test_housekeeping_gives_up(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that cannot be removed does not keep a manager from ending. The next manager removes it."""
    root = faults.url.rpartition("/")[0]
    faults.proxy.rule = lambda exchange: "stall" if exchange.kind == "delete" and "/step-1/" in exchange.path else None
    manager = bcp.CheckpointManager(
        root, cadence=1, keep=1, storage_options=faults.options, job=bcp.JobOptions(deadline_s=faults.deadline_s)
    )
    manager.save(2, _state(2))
    with faults.endured():
        manager.close()
    assert "step-1 could not be removed" in caplog.text
    newest = bcp.latest(root, storage_options=faults.direct)
    assert newest is not None
    assert newest.step == 2
    with bcp.CheckpointManager(root, cadence=1, keep=1, storage_options=faults.direct) as manager:
        manager.save(3, {"extra_state": {"step": 3}})
    kept = open_backend(root, **faults.direct).list_children("")
    assert [name for name in kept if name.startswith("step-")] == ["step-3/"]
