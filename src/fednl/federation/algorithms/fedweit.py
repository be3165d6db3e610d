"""FedWeIT: a shared base under a mask, parts of each task's own, and other clients' parts by attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from fednl.federation.algorithms import weit_parts as parts
from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params

MASK_START = math.log(2.0)
"""What a mask's logit starts at: the mask is then 2/3, and the adaptive part the third of the base that is missing."""


class FedWeItSettings(Section):
    """The `[fedweit]` section.

    Args:
        parts: what a task has of its own beside the shared base: `"adaptive"`, and with it `"mask"` and `"attention"`.
            With no part, `drift = 0` and `unsent = 0` this is FedAvg.
        sparsity: the paper's lambda_1, at least 0: the factor of the sum of all |A|; what is left of A below it is set
            to zero before it is sent.
        drift: the paper's lambda_2, at least 0: how strongly the rules of earlier tasks are held where they were.
        unsent: the part of a rule's rows, those of the lowest mask, that a client leaves out of the base's mean; at
            least 0, below 1.
    """

    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    parts: tuple[Literal["adaptive", "mask", "attention"], ...] = Field(
        default=("adaptive", "mask", "attention"), strict=False
    )
    sparsity: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    drift: float = Field(default=100.0, ge=0, allow_inf_nan=False)
    unsent: float = Field(default=0.3, ge=0, lt=1)

    @model_validator(mode="after")
    def _all_rest_on_the_adaptive_part(self) -> FedWeItSettings:
        if self.parts and "adaptive" not in self.parts:
            raise ValueError('parts must hold "adaptive" beside "mask" or "attention", or be empty')
        if self.unsent and "mask" not in self.parts:
            raise ValueError(f'unsent = {self.unsent:g} goes by the mask: add "mask" to parts, or set unsent = 0')
        return self


class FedWeIt(FedAvg):
    """Answers task t with B m_t + A_t + sum_j a_tj A_j: only the base B is averaged, all else is a task's own.

    B are the shared rules. m_t is a mask in (0, 1), one number a row; A_t the task-adaptive part, of B's shape; the A_j
    are the latest finished adaptive parts of other clients, frozen, and a_tj one trained weight for each of them and
    each rule. Added to the loss are sparsity sum |A| over all tasks, and drift / 2 sum |B m_i + A_i - w_i|^2 over
    earlier tasks i, with w_i what B m_i + A_i was when the client's last task ended.

    What leaves a client beside B: from a task's last round on its A_t, with the numbers below `sparsity` set to zero,
    until a round has counted it. The server keeps each client's latest and sends every client those of the others, as
    they are and without names, once after each round that brought new ones; the client keeps them for its next task.
    Whoever must not show what a client learned to the others must not use this. Everything else stays in the client's
    state: the running task's parts as `now/...`, those of finished ones as `task/TASK/...`. A client answers a question
    of a finished task with that task's parts and the base as it is now (`answers`); any other with the parts of the
    task it is at, or the base alone. The rules that `fednl.load` finds are the base. Settings: `FedWeItSettings`.

    Source: Yoon et al. 2021 (arXiv 2003.03196), eqs. 1 and 2 and Algorithm 1; the half, the mask a row and the rows
    left out as in its public code. Ours: a task starts at the base as it came (mask 2/3, A_t = B / 3, weights 0), and
    its optimiser anew; dense tensors on the wire; rules that do not travel have one value for all tasks; weight decay,
    the mask's penalty and the rate's decay of the public code are left out, for decision 0013.
    """

    Settings: ClassVar[type[BaseModel]] = FedWeItSettings
    traits: ClassVar[Traits] = Traits(one_client_is_local=False, sends_extra=True, passes_on=True, keeps_own=True)

    def extra(self, params: Params) -> Params:
        """Names each shared rule's adaptive part, and the rows of the base that a client lets count.

        In a reply `adaptive/NAME` is the client's own, there from a task's end until the server says that a reply with
        it counted (`Message.counted`); from the server it is the other clients', with one more axis in front.
        `sent/NAME` is 1 for a row that counts and 0 for one that does not.

        Args:
            params: the shared rules.
        """
        import torch

        names = self.shared(params) if self.settings.parts else []
        extra = {f"adaptive/{name}": torch.zeros_like(params[name]) for name in names}
        if self.settings.unsent:
            extra |= {f"sent/{name}": params[name].new_zeros(params[name].shape[:1]) for name in names}
        return extra

    def apart(self, names: Iterable[str]) -> list[str]:
        """Lists the adaptive parts, which go to others as they are.

        Args:
            names: of what a message carries beside the rules.
        """
        return [name for name in names if name.startswith("adaptive/")]

    def once(self, server_state: ClientState) -> Params:
        """Gives everybody's latest adaptive parts: a client keeps others' and takes them up where its next task begins.

        Args:
            server_state: `adaptive/CLIENT/NAME`.
        """
        return parts.side_by_side(server_state)

    def to_client(self, beside: Params, client: str, server_state: ClientState, counted: int) -> Params:
        """Gives all other clients' latest adaptive parts, stacked in the order of their names, which are not told.

        Args:
            beside: as `once` gave it; nothing for a client that has it.
            client: its name.
            server_state: not looked at.
            counted: not looked at here; the client is told it by `Message.counted`.
        """
        return parts.of_others(client, beside)

    def start(self, received: Message, state: ClientState, problem: Problem) -> tuple[Params, ClientState]:
        """Starts from the base and keeps what came of others; a task that begins takes that up, and has its own parts.

        Args:
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        from fednl.federation.params import kept

        rules, state = super().start(received, state, problem)
        state = parts.without_counted(state, received.counted)
        if "ended" in state:  # late, after its last round: the base in the reply goes by the task that begins
            moments = "optimizer/" if self.settings.parts else "ended"
            state = {name: t for name, t in state.items() if not name.startswith(("ended", moments))}
        if "attention" in self.settings.parts and (came := kept(received.extra, "adaptive")):
            state = {**state, **{f"heard/{name}": stacked for name, stacked in came.items()}}
        if self.settings.parts and not any(name.startswith("now/") for name in state):
            fresh = self._fresh(rules, state)
            state = {name: tensor for name, tensor in state.items() if not name.startswith("heard/")} | fresh
        return {**rules, **{name: tensor for name, tensor in state.items() if parts.is_moved(name)}}, state

    def gradient(self, params: Params, batch: Any, received: Message, state: ClientState, problem: Problem) -> Params:
        """Gives the gradient of the loss at the running task's rules, and of the penalty, for all parts.

        Args:
            params: the base, the running task's parts, and the adaptive parts of earlier tasks.
            batch: one item of `problem.batches`.
            received: the server's message.
            state: the client's state, with the others' adaptive parts.
            problem: the client's data and loss.
        """
        from fednl.federation.params import value_and_gradient

        def loss(leaves: Params) -> torch.Tensor:
            return problem.loss(parts.composed(leaves, state), batch) + self.penalty(leaves, received, state)

        return value_and_gradient(loss, params, self.trainable(params))[1]

    def penalty(self, params: Params, received: Message, state: ClientState) -> torch.Tensor | float:
        """Gives the sparsity of all adaptive parts and the drift of earlier tasks.

        Args:
            params: as in `gradient`, as autograd leaves.
            received: the server's message.
            state: the client's state, with the masks and anchors of earlier tasks.
        """
        total: torch.Tensor | float = 0.0
        if self.settings.sparsity:
            adaptive = [name for name in params if "/adaptive/" in name]  # the running task's, and finished ones'
            total += self.settings.sparsity * sum(params[name].abs().sum() for name in adaptive)
        if self.settings.drift:
            anchors = {name: state[name] for name in parts.anchors(state)}
            now = {name: parts.finished(name, {**state, **params}) for name in anchors}
            total += self.settings.drift / 2 * sum((now[name] - anchors[name]).square().sum() for name in anchors)
        return total

    def boundary(self, task: str, params: Params, state: ClientState, problem: Problem) -> ClientState:
        """Puts the task's parts aside under its name, owed to the server; notes where all finished tasks are now.

        Args:
            task: the name of the task that ends.
            params: as in `gradient`, after the last local step.
            state: the client's state.
            problem: the task's data and loss.
        """
        import torch

        from fednl.federation.params import copy

        ends = self.settings.parts or self.settings.drift
        shared = self.shared(name for name in params if parts.is_base(name)) if ends else []
        aside = copy(parts.put_aside(task, shared, {**state, **params})) | {"ended": torch.ones(())}
        if self.settings.parts:  # of two that the server lacks, the later one is what others get
            aside = {name: tensor for name, tensor in aside.items() if not name.startswith("owed/")}
            aside[f"owed/{task}"] = torch.tensor(0)
        return aside

    def finish(
        self, params: Params, received: Message, state: ClientState, problem: Problem
    ) -> tuple[Message, ClientState]:
        """Sends the base, which of its rows count, and a finished task's adaptive part until the server has counted it.

        Args:
            params: as in `gradient`, after the last local step.
            received: the server's message.
            state: the client's state; after a task's end as `boundary` gave it.
            problem: the client's data and loss.
        """
        import torch

        from fednl.federation.params import copy

        rules = {name: tensor for name, tensor in params.items() if parts.is_base(name)}
        message, state = super().finish(rules, received, state, problem)
        sent, extra = dict(message.params), {}
        for name in sent if self.settings.unsent else []:
            counts = parts.counting(params[f"now/mask/{name}"], self.settings.unsent)
            sent[name] = sent[name].where(parts.by_rows(counts, sent[name]) > 0, received.params[name])
            extra[f"sent/{name}"] = counts
        if task := parts.owed(state):
            own = {**state, **params}
            extra |= {f"adaptive/{name}": self._pruned(own[f"task/{task}/adaptive/{name}"]) for name in sent}
            since = int(state[f"owed/{task}"]) or received.round
            state = {**state, f"owed/{task}": torch.tensor(since)}
        if "ended" not in state:
            return replace(message, params=sent, extra=extra), {**state, **copy(parts.moved(params))}
        moments = "optimizer/" if self.settings.parts else "ended"
        state = {name: t for name, t in state.items() if not name.startswith(("ended", moments))}
        return replace(message, params=sent, extra=extra), state

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Averages each row of the base over the clients that let it count; keeps what single clients sent.

        Args:
            params: the shared rules that were sent out.
            combined: the combined replies, a `fednl.federation.apart.Combined` where clients sent adaptive parts.
            server_state: `adaptive/CLIENT/NAME`, each client's latest.
        """
        from fednl.federation.apart import Combined

        new, state = super().server_step(params, combined, server_state)
        for name in new:
            if (share := combined.extra.get(f"sent/{name}")) is not None:
                new[name] = parts.mean_of_senders(params[name], new[name], share)
        came = combined.apart.items() if isinstance(combined, Combined) else ()
        latest = {(client, key.partition("/")[2]): tensor for client, own in came for key, tensor in own.items()}
        return new, {**state, **{f"adaptive/{client}/{name}": tensor for (client, name), tensor in latest.items()}}

    def answers(self, params: Params, state: ClientState) -> Params:
        """Gives the rules of the task the client is at, or the base; and those of finished tasks as `TASK/NAME`.

        Args:
            params: all rules, the shared ones as the server has them now.
            state: the client's state.
        """
        own = super().answers(params, state)
        found = parts.composed({**own, **parts.moved(state)}, state)
        for key in parts.anchors(state):
            _, task, _, name = key.split("/")
            found[f"{task}/{name}"] = parts.finished(key, {**state, **own}) + state.get(
                key.replace("/anchor/", "/borrowed/"), 0
            )
        return found

    def _fresh(self, rules: Params, state: ClientState) -> Params:
        """The parts that a task starts with: together with the base they are the base."""
        import torch

        from fednl.federation.params import kept

        fresh: Params = {}
        names, own = self.shared(rules), self.settings.parts
        for name in names:
            mask = rules[name].new_full(rules[name].shape[:1], MASK_START)
            missing = rules[name] * (1 - parts.by_rows(torch.sigmoid(mask), rules[name]))
            fresh[f"now/adaptive/{name}"] = missing if "mask" in own else torch.zeros_like(rules[name])
            if "mask" in own:
                fresh[f"now/mask/{name}"] = mask
        others = kept(state, "heard") if "attention" in own else {}
        for name, stacked in others.items():
            fresh[f"now/others/{name}"] = stacked
            fresh[f"now/attention/{name}"] = stacked.new_zeros(len(stacked))
        return fresh

    def _pruned(self, adaptive: torch.Tensor) -> torch.Tensor:
        pruned: torch.Tensor = adaptive * (adaptive.abs() > self.settings.sparsity)
        return pruned
