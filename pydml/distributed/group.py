"""The process group as sharded losses see it: collectives that take unequal shards and turn failures into reasons.

Everything goes through ``torch.distributed`` (gloo, NCCL). Without a process group there is one rank and no traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pydml import checks


class Group:
    """Ranks that work on one batch."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        alone = not (dist.is_available() and dist.is_initialized())
        if alone and group is not None:
            raise ValueError("group: got a process group, wanted torch.distributed.init_process_group called first")
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: got one that this process is not in, wanted a group with it")
        #: Bytes that have come to this rank so far, for those who want to know what a step moves.
        self.received = 0
        #: Where small numbers of all ranks meet: the CPU if the group can, so that no GPU has to be waited for.
        gloo = alone or "gloo" in dist.get_backend_config(group)
        self.device = torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"torch.distributed: rank {self.rank} of {self.size} could not {doing}: another rank died, raised an "
                f"error of its own, or did not answer within the group's timeout. The backend says: {error}"
            ) from error

    def all_gather(self, x: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """The ranks' rows, one after the other; ``sizes`` are their numbers of rows."""
        if self.size == 1:
            return x
        most = max(sizes)
        if not most:
            return x
        padded = x.contiguous()
        if len(x) < most:
            padded = x.new_zeros(most, *x.shape[1:])
            padded[: len(x)] = x
        out = x.new_empty(self.size, *padded.shape)
        with self._reported(f"gather {what}"):
            dist.all_gather(list(out.unbind()), padded, group=self.group)
        self.received += (self.size - 1) * padded.nbytes
        if min(sizes) == most:
            return out.flatten(0, 1)
        return torch.cat([part[:n] for part, n in zip(out, sizes, strict=True)])

    def all_reduce(self, x: Tensor, what: str, largest: bool = False) -> Tensor:
        """The sum, or the largest, over all ranks."""
        if self.size == 1:
            return x
        out = x.clone(memory_format=torch.contiguous_format)
        with self._reported(f"{'compare' if largest else 'add up'} {what}"):
            dist.all_reduce(out, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        self.received += 2 * (self.size - 1) * out.nbytes // self.size  # of the usual reduce-scatter and all-gather
        return out

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int], what: str) -> Tensor:
        """Rows for every rank, ``send`` of them each, against the rows of every rank for this one."""
        if self.size == 1:
            return x
        out = x.new_empty(sum(receive), *x.shape[1:])
        with self._reported(f"exchange {what}"):
            dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=self.group)
        self.received += out.nbytes - out[: receive[self.rank]].nbytes
        return out

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """The sum over all ranks of this rank's rows, from what every rank has for all rows [Σ sizes, …]."""
        if self.size == 1:
            return x
        mine = sizes[self.rank]
        parts = self.exchange(x, sizes, [mine] * self.size, what)
        # added in the order of the ranks: the same bits in every run
        total: Tensor = parts.reshape(self.size, mine, *x.shape[1:]).sum(0)
        return total

    def peer(self, rank: int) -> int:
        """A rank of this group by its number among all processes, which is how P2P operations address it."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def shift(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]], what: str) -> Transfer:
        """Start sending tensors to ranks and receiving others from ranks; empty ones are left out on both sides."""
        operations = [dist.P2POp(dist.isend, x, self.peer(to), self.group) for x, to in sent if x.numel()]
        operations += [dist.P2POp(dist.irecv, x, self.peer(of), self.group) for x, of in received if x.numel()]
        with self._reported(f"start to pass on {what}"):
            work = dist.batch_isend_irecv(operations) if operations else []
        self.received += sum(x.nbytes for x, _ in received)
        return Transfer(self, work, what)

    def broadcast(self, x: Tensor, what: str) -> None:
        """Overwrite a tensor with that of the first rank."""
        if self.size > 1:
            with self._reported(f"broadcast {what}"):
                dist.broadcast(x, self.peer(0), group=self.group)

    def facts(self, numbers: Sequence[int], error: Exception | None) -> list[list[int]]:
        """Everybody's integers; where any rank has an error, raise it on all of them.

        This comes before any collective whose shape depends on what a rank was given, so a wrong argument on one rank
        cannot leave the others waiting.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return [list(numbers)]
        mine = torch.tensor([[int(error is not None), *numbers]], device=self.device)
        table = self.all_gather(mine, [1] * self.size, "the shapes of the shards").tolist()
        if any(row[0] for row in table):
            self._raise_everywhere(error)
        return [row[1:] for row in table]

    def _raise_everywhere(self, error: Exception | None) -> None:
        told: list[Any] = [None] * self.size
        mine = None if error is None else (isinstance(error, TypeError), str(error))
        with self._reported("tell the other ranks what is wrong"):
            dist.all_gather_object(told, mine, group=self.group)
        wrong = {rank: said for rank, said in enumerate(told) if said is not None}
        kind = TypeError if all(of_type for of_type, _ in wrong.values()) else ValueError
        raise kind("; ".join(f"rank {rank}: {message}" for rank, (_, message) in wrong.items())) from error


#: Place among the facts of a rank -> argument, what it is, and how to say it.
Rules = dict[int, tuple[str, str, Callable[[int], str]]]


def same_shapes(argument: str) -> Rules:
    """The rules for facts that begin with the number of rows, their width and their dtype."""
    return {1: (argument, "widths", str), 2: (argument, "dtypes", lambda at: str(checks.FLOATS[at]))}


def compare(table: list[list[int]], rules: Rules) -> None:
    """Raise, on all ranks alike, where facts that must be the same on all ranks are not."""
    for at, (argument, what, say) in rules.items():
        values = [row[at] for row in table]
        if len({*values}) > 1:
            given = ", ".join(f"{say(value)} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{argument}: got different {what}: {given}; wanted the same on all ranks")


def same_parameters(group: Group, parameters: Mapping[str, Tensor]) -> None:
    """Raise, on all ranks alike, where names, shapes or dtypes of parameters are not those of the first rank.

    A broadcast of tensors that differ ends a process, or leaves bytes of one dtype to be read as another.
    """
    if group.size == 1:
        return
    told: list[dict[str, str]] = [{} for _ in range(group.size)]
    mine = {name: f"{list(x.shape)} of {x.dtype}" for name, x in parameters.items()}
    with group._reported("compare the parameters of the loss"):
        dist.all_gather_object(told, mine, group=group.group)
    for name in dict.fromkeys(name for one in told for name in one):
        given = [one.get(name, "none") for one in told]
        if len({*given}) > 1:
            words = ", ".join(f"{what} on rank {rank}" for rank, what in enumerate(given))
            raise ValueError(
                f"loss: got different parameters {name}: {words}; wanted the same shape and dtype everywhere"
            )


def gather_batch(group: Group, embeddings: Any, labels: Any) -> tuple[Tensor, Tensor, list[int]]:
    """All ranks' embeddings and labels, checked, without gradients, and how many each rank has."""
    error, facts = None, [0, 0, 0]
    try:
        z = checks.embeddings("embeddings", embeddings).detach()
        y = checks.labels("labels", labels, z)
        facts = [len(z), z.shape[1], checks.FLOATS.index(z.dtype)]
    except (TypeError, ValueError) as wrong:
        error = wrong
    table = group.facts(facts, error)
    compare(table, same_shapes("embeddings"))
    sizes = [row[0] for row in table]
    return group.all_gather(z, sizes, "embeddings"), group.all_gather(y, sizes, "labels"), sizes


class Transfer:
    """P2P operations under way."""

    def __init__(self, group: Group, work: Sequence[Any], what: str) -> None:
        self.group, self.work, self.what = group, work, what

    def wait(self) -> None:
        with self.group._reported(f"pass on {self.what}"):
            for work in self.work:
                work.wait()
