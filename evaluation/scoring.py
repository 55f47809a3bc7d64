"""Losses of continuations: batched by length, logits at scored positions alone, no key-value cache.

Legend: B rows of a batch, T tokens, P scored positions, V vocabulary.

Requests that share a context (the choices of an item) are scored in one row, context first, then the
choices side by side, each of which sees the context and itself (a tree of attention). Whether a model
computes such rows as it computes single ones is tried once (`takes_trees`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

Logits = Callable[..., torch.Tensor]  # input_ids, attention_mask, position_ids, logits_to_keep


@dataclass(frozen=True, kw_only=True)
class Request:
    """Token ids of a context (at least one) and of the continuation that is scored (at least one)."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Nats of every token of a continuation, and whether each was the likeliest one."""

    losses: tuple[float, ...]
    greedy: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row of a batch: a context and the continuations after it, each but its last token."""

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        return len(self.context) + sum(len(one) - 1 for one in self.continuations)


def score(
    logits: Logits,
    requests: Sequence[Request],
    *,
    batch_size: int,
    device: torch.device,
    trees: bool,
    done: Callable[[int], object] = lambda count: None,
) -> list[Scores]:
    """Score every request, each distinct one once. `done` is told how many were scored, batch by batch."""
    found: dict[Request, Scores] = {}
    rows = sorted(_rows(dict.fromkeys(requests), trees), key=lambda row: -row.length)
    for batch in _batches(rows, batch_size):
        for row, scores in zip(batch, _score(logits, batch, device), strict=True):
            for continuation, one in zip(row.continuations, scores, strict=True):
                found[Request(context=row.context, continuation=continuation)] = one
        done(sum(len(row.continuations) for row in batch))
    return [found[request] for request in requests]


def takes_trees(logits: Logits, vocab_size: int, device: torch.device) -> bool:
    """Whether rows with several continuations give the losses of single rows, to 1e-4 nats.

    A model that ignores masks of four dimensions is off by far more, kernels by far less.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (13,), generator=generator).tolist()
    requests = [
        Request(context=tuple(ids[:5]), continuation=tuple(part))
        for part in (ids[5:8], ids[8:12], ids[6:8])
    ]

    def losses(trees: bool) -> torch.Tensor:
        found = score(logits, requests, batch_size=8, device=device, trees=trees)
        return torch.tensor([loss for one in found for loss in one.losses])

    try:
        together = losses(True)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return bool((together - losses(False)).abs().max() < 1e-4)


def is_causal(logits: Logits, vocab_size: int, device: torch.device, length: int = 12) -> bool:
    """Whether other tokens at the end of `length` ones leave the logits before them as they were.

    Raises ValueError for logits that are not finite.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, length), generator=generator)
    changed, kept = ids.clone(), length * 2 // 3
    changed[0, kept:] = (ids[0, kept:] + 1) % vocab_size
    first, second = (
        logits(input_ids=one.to(device), logits_to_keep=torch.arange(kept, device=device)).float()
        for one in (ids, changed)
    )
    if not (first.isfinite().all() and second.isfinite().all()):
        raise ValueError("The logits of random tokens are not finite: are the weights damaged?")
    return bool((first - second).abs().max() < 1e-3)


def _rows(requests: Sequence[Request] | dict[Request, None], trees: bool) -> list[_Row]:
    """Group requests of one context; a choice of one token adds no position at all."""
    if not trees:
        return [_Row(context=one.context, continuations=(one.continuation,)) for one in requests]
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for one in requests:
        groups.setdefault(one.context, []).append(one.continuation)
    return [_Row(context=context, continuations=tuple(each)) for context, each in groups.items()]


def _batches(rows: Sequence[_Row], batch_size: int) -> Iterator[Sequence[_Row]]:
    """Cut rows, longest first, into batches; only rows that need a tree share a batch with one."""
    for trees in (False, True):
        kind = [row for row in rows if _is_tree(row) == trees]
        for start in range(0, len(kind), batch_size):
            yield kind[start : start + batch_size]


def _is_tree(row: _Row) -> bool:
    """Whether a continuation follows another one's tokens."""
    return sum(len(one) > 1 for one in row.continuations) > 1


def _score(logits: Logits, batch: Sequence[_Row], device: torch.device) -> list[list[Scores]]:
    """Scores of every continuation of every row."""
    length = max(row.length for row in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)  # [B, T], padded on the right
    for number, row in enumerate(batch):
        tokens = [*row.context, *(token for one in row.continuations for token in one[:-1])]
        ids[number, : len(tokens)] = torch.tensor(tokens)
    places = [_places(row) for row in batch]
    wanted = sorted({place for row in places for one in row for place in one})  # [P]
    inputs = {"input_ids": ids.to(device)}
    if any(_is_tree(row) for row in batch):
        inputs |= {name: value.to(device) for name, value in _tree(batch, length).items()}
    output = logits(**inputs, logits_to_keep=torch.tensor(wanted, device=device))  # [B, P, V]
    column = {place: at for at, place in enumerate(wanted)}
    triples = [
        (at, column[place], token)
        for at, (row, row_places) in enumerate(zip(batch, places, strict=True))
        for one, one_places in zip(row.continuations, row_places, strict=True)
        for place, token in zip(one_places, one, strict=True)
    ]
    at, column_of, target = (
        torch.tensor(part, device=device) for part in zip(*triples, strict=True)
    )
    scored = output[at, column_of]
    scored = scored.to(torch.promote_types(scored.dtype, torch.float32))
    losses = iter(functional.cross_entropy(scored, target, reduction="none").tolist())
    greedy = iter((scored.argmax(-1) == target).tolist())
    return [
        [
            Scores(losses=tuple(next(losses) for _ in one), greedy=tuple(next(greedy) for _ in one))
            for one in row.continuations
        ]
        for row in batch
    ]


def _places(row: _Row) -> list[list[int]]:
    """Positions whose logits predict each continuation's tokens."""
    last, start = len(row.context) - 1, len(row.context)
    out = []
    for one in row.continuations:
        out.append([last, *range(start, start + len(one) - 1)])
        start += len(one) - 1
    return out


def _tree(batch: Sequence[_Row], length: int) -> dict[str, torch.Tensor]:
    """Mask [B, 1, T, T] (true: seen) and positions [B, T] of rows with several continuations."""
    seen = torch.tril(torch.ones(length, length, dtype=torch.bool)).repeat(len(batch), 1, 1)
    positions = torch.arange(length).repeat(len(batch), 1)
    for at, row in enumerate(batch):
        shared = start = len(row.context)
        for one in row.continuations:
            end = start + len(one) - 1
            seen[at, start:end, shared:start] = False
            positions[at, start:end] = shared + torch.arange(end - start)
            start = end
    return {"attention_mask": seen[:, None], "position_ids": positions}
