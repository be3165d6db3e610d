"""What holds for an algorithm, said by the algorithm itself. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """Which laws hold for an algorithm, so that one suite of tests can check each where it applies, and what it needs.

    Args:
        one_client_is_local: with one client, a run equals the same steps without federation, bit for bit.
        identical_clients_unchanged: clients that send the same rules get those rules back, bit for bit.
        order_free: neither the order of clients nor of their replies changes a bit.
        shares: something travels at all.
        sends_extra: messages carry tensors beside the rules.
        passes_on: what single clients send goes to all others, as it is.
        keeps_own: a client answers with rules of its own even where all of them are shared.
        needs_context: it trains the coefficients of context vectors, so settings without that adapter are refused.
        needs_lora: it does nothing of its own without a LoRA, so settings without one are refused.
        needs_tasks: it is FedAvg until a task of a stream has ended; a report says so where none does.
        averages_products: its server reads the mean product of the clients' LoRA factors, which `combined.extra` then
            holds as factors under their own names; a rule that does not average cannot give it.
        sends_change: the LoRA factors of a reply are the round's change itself, so that a component that a client lacks
            is zero in the mean product; of others, it counts for those who have it.
        renews_factors: its LoRA factors are others every round, so nothing may be kept for single numbers of them.
    """

    one_client_is_local: bool = True
    identical_clients_unchanged: bool = True
    order_free: bool = True
    shares: bool = True
    sends_extra: bool = False
    passes_on: bool = False
    keeps_own: bool = False
    needs_context: bool = False
    needs_lora: bool = False
    needs_tasks: bool = False
    averages_products: bool = False
    sends_change: bool = False
    renews_factors: bool = False
