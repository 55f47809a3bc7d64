"""What a run watches besides its loss: gradient norms by section of the model, and the recurrent states.

Shapes: B rows, T positions, D hidden size, S sections.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

# Sections and the modules they hold, by a part of their parameters' names; the rest is "other".
SECTIONS = {
    "embedding": ("embed_tokens",),
    "prelude": ("prelude",),
    "injection": ("injection",),
    "recurrent": ("recurrent",),
    "coda": ("coda",),
    "norm": ("embed_norm", "recurrent_norm", "norm"),
    "lm_head": ("lm_head",),
    "other": (),
}
CHUNK = (
    2**20
)  # elements that a float32 sum takes: on CPUs it loses 1e-3 of the norm over 2e7 of them, 1e-5 over these
_SECTION_OF = {module: section for section, modules in SECTIONS.items() for module in modules}


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """2-norm of all gradients as "gradient_norm" and of each section's as "gradient_norm/SECTION".

    Squares of the sections add up to that of the whole; sections without gradients are left out. The model may be
    wrapped (DistributedDataParallel, torch.compile) or sharded (FSDP2): every process calls this and gets the norms of
    the whole model, for one all-reduce and one transfer to the host. NaN or infinite gradients give a norm that is not
    finite, and so does a norm of a single parameter beyond 1.8e19, whose square float32 doesn't hold.
    """
    members: dict[Any, dict[str, list[torch.Tensor]]] = {}  # by layout, then by section
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        layout = None
        if isinstance(gradient, DTensor):
            placements = [
                Replicate() if p.is_replicate() else Partial() for p in gradient.placements
            ]
            layout = gradient.device_mesh, tuple(placements)
            gradient = gradient.to_local()
        chunks = gradient.reshape(-1).split(CHUNK)
        members.setdefault(layout, {}).setdefault(_section(name), []).extend(chunks)
    if not members:
        return {"gradient_norm": 0.0}
    squares = sum(_squares(sections, layout) for layout, sections in members.items())
    assert isinstance(squares, torch.Tensor)
    found = {section for sections in members.values() for section in sections}
    by_section = dict(zip(SECTIONS, squares.tolist(), strict=True))
    norms = {"gradient_norm": math.sqrt(sum(by_section.values()))}
    return norms | {
        f"gradient_norm/{section}": math.sqrt(square)
        for section, square in by_section.items()
        if section in found
    }


def _section(name: str) -> str:
    """Section of a parameter; what wrappers put in front ("module.", "_orig_mod.") is no section's."""
    return next((_SECTION_OF[part] for part in name.split(".") if part in _SECTION_OF), "other")


def _squares(sections: dict[str, list[torch.Tensor]], layout: Any) -> torch.Tensor:
    """Sum of squares of each section over all processes, [S] float64.

    layout: the device mesh and what a sum over local shards is on it (Partial) or is not (Replicate); None: no shards.
    """
    gradients = [gradient for section in SECTIONS for gradient in sections.get(section, [])]
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).double()
    parts = norms.split([len(sections.get(section, [])) for section in SECTIONS])
    squares = torch.stack([part.square().sum() for part in parts])
    if layout is None:
        return squares
    return DTensor.from_local(squares, *layout).full_tensor()


@torch.no_grad()
def state_norms(recurrent_states: Sequence[torch.Tensor]) -> dict[str, float]:
    """Size of the state after each recurrence t = 1, 2, … and its relative change since the one before.

    `recurrent_states` [B, T, D] each, as the model returns them with `output_recurrent_states`, without the initial
    state. "state_norm/t" is √mean(h_t²) over all channels of all tokens; "state_change/t", from t = 2, is
    ‖h_t − h_{t−1}‖ / ‖h_{t−1}‖ over all tokens. Both are of the rows given, so those of one process, and cost one
    transfer to the host.

    How to read them: where every recurrence ends in a norm (`recurrent_norm`), state_norm stays near that norm's gain,
    1 at the start, and a drift is the gain's; without it, and for the sum of hyperconnection lanes, it may grow with t,
    and a state that blows up does so here first. Changes that fall with t are a state that converges. Changes near 0
    from t = 2 on mean that later recurrences do nothing; those that stay near √2 (unrelated states of equal size) or
    grow with t, that the state has not settled.
    """
    states = [state.detach().float() for state in recurrent_states]
    norms = [torch.linalg.vector_norm(state) for state in states]
    values = {
        f"state_norm/{t}": norm / math.sqrt(state.numel())
        for t, (state, norm) in enumerate(zip(states, norms, strict=True), start=1)
    }
    for t in range(2, len(states) + 1):
        change = torch.linalg.vector_norm(states[t - 1] - states[t - 2])
        values[f"state_change/{t}"] = change / norms[t - 2]
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
