"""Apply target layouts to real tensors, by views of whole tensors or from their parts alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.target_layout import TargetLayout
from bytecheckpoint.inference.layouts.parts import StridedView, box_of
from bytecheckpoint.tensors.geometry import Box


def view_of(tensor: torch.Tensor, view: StridedView) -> torch.Tensor:
    return tensor.detach().as_strided(view.shape, view.strides, view.offset)


def replay(layout: TargetLayout, weights: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    for placement in layout.placements:
        stored = weights[layout.stored[placement.stored].name].contiguous()
        target = parameters[layout.parameters[placement.parameter].name]
        view_of(target, placement.target).copy_(view_of(stored, placement.view))


def replay_from_parts(
    layout: TargetLayout, weights: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> None:
    sent = {
        (part.name, part.box, part.dtype.name): weights[part.name][part.box.slices()]
        .clone()
        .to(getattr(torch, part.dtype.name))
        for part in layout.parts()
    }
    for placement in layout.placements:
        source, parameter = layout.stored[placement.stored], layout.parameters[placement.parameter]
        target = view_of(parameters[parameter.name], placement.target)
        whole = Box.whole(source.shape)
        found = box_of(source.shape, placement.view)
        for dtype in (source.dtype.name, parameter.dtype.name):
            complete = sent.get((source.name, whole, dtype))
            if complete is not None:
                target.copy_(view_of(complete, placement.view))
                break
        else:
            assert found is not None, source.name
            assert found.order is not None
            part = sent[source.name, found.box, parameter.dtype.name]
            turned = part.reshape([placement.view.shape[d] for d in found.order])
            target.permute(found.order).copy_(turned)
