"""What ``fedasync show`` prints of a cluster's run: time, throughput, staleness by definition, length bias, prompts."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from fedasync.runs.cluster_measures import STEP_PARTS, shares_text
from fedasync.runs.staleness_kinds import KINDS


def cluster_tables(summary: dict[str, Any]) -> list[Table]:
    """The tables of a summary that has ``rollouts``."""
    told = summary["rollouts"]
    tables = [_shares(summary.get("shares", {})), _throughput(told["throughput"])]
    if told["staleness"]:
        tables += [_staleness(told["staleness"], told["warm_up_versions"]), _older_tokens(told["older_tokens"])]
    if told["length_bias"]["deciles"]:
        tables.append(_length_bias(told["length_bias"]))
    tables.append(_conservation(told["conservation"], told["reissues"]))
    if told["starvation"]["prompts"]:
        tables.append(_starvation(told["starvation"]))
    if told["waste"]["generated_tokens"]:
        tables.append(_waste(told["waste"]))
    return [table for table in tables if table.row_count]


def _shares(shares: dict[str, dict[str, float | None]]) -> Table:
    table = Table("who", "share of time", title="what trainer and servers did with their time")
    for who, parts in shares.items():
        text = ", ".join(f"{what} {share}" for what, share in shares_text(parts).items())
        table.add_row(who, text or "not measured: no version came after the warm-up")
    return table


def _throughput(told: dict[str, Any]) -> Table:
    table = Table(
        "step (s)", "p50", "p95", "tokens/s", "of answers", "groups/s", title="throughput without the warm-up"
    )
    if told["versions"]:
        step = told["step_s"]
        rates = [told[f"{name}_per_second"] for name in ("tokens", "generated_tokens", "groups")]
        table.add_row(*(_number(value) for value in (step["mean"], step["p50"], step["p95"], *rates)))
        parts = {name: told[name] for name in STEP_PARTS if told.get(name)}
        table.caption = "; ".join(f"mean {name} {_number(value)}" for name, value in parts.items()) or None
    return table


def _staleness(rows: list[dict[str, Any]], warm_up_versions: int) -> Table:
    table = Table(
        *("counted from", "unit", "mean", "p50", "p99", "max", "tokens' mean", "used by"),
        title="staleness of trained answers, by definition",
    )
    systems = {kind.name: kind.systems for kind in KINDS}
    for row in rows:
        numbers = (_number(row[name]) for name in ("mean", "p50", "p99", "max", "token_mean"))
        table.add_row(row["kind"].replace("_", " "), row["unit"], *numbers, escape(systems[row["kind"]]))
    if warm_up_versions:
        table.caption = f"without the first {warm_up_versions} versions"
    return table


def _older_tokens(rows: list[dict[str, Any]]) -> Table:
    """Of ages that some token may have."""
    table = Table("versions", "share of trained tokens that are older", title="tokens beyond a bound (xtuner)")
    for row in rows:
        least, most = row["share_at_least"], row["share_at_most"]
        if most > 0:
            same = most - least < 5e-4
            table.add_row(str(row["versions"]), f"{most:.1%}" if same else f"{least:.1%} to {most:.1%}")
    return table


def _length_bias(told: dict[str, Any]) -> Table:
    table = Table("tenth by length", "up to (tokens)", "generated", "trained", "ratio", title="length bias")
    for tenth, part in enumerate(told["deciles"], start=1):
        shares = (_percent(part["generated_share"]), _percent(part["trained_share"]))
        table.add_row(str(tenth), f"{part['to_tokens']}", *shares, _number(part["ratio"]))
    counts = told["answers"]
    means = " / ".join(_number(told[f"{which}_mean_tokens"]) for which in ("trained", "dropped", "generated"))
    caption = f"trained over generated length {_number(told['ratio'])}"
    if counts["aborted"]:
        caption += f", at most {_number(told['ratio_at_most'])} with the {counts['aborted']} aborted answers"
    table.caption = f"{caption}; mean tokens trained / dropped / generated {means}; {counts['undecided']} undecided"
    return table


def _conservation(told: dict[str, Any], reissues: dict[str, int]) -> Table:
    table = Table("where", "prompts", "groups", title="conservation of prompts")
    prompts, groups = (_flat(told[what]) for what in ("prompts", "groups"))
    for place in dict.fromkeys([*prompts, *groups]):
        table.add_row(escape(place), *(str(counts.get(place, "")) for counts in (prompts, groups)))
    table.add_section()
    table.add_row("all", str(sum(prompts.values())), str(sum(groups.values())))
    if reissues["groups"]:
        table.caption = (
            f"{reissues['groups']} groups were issued again, of {reissues['prompts']} prompts, "
            f"one at most {reissues['most']} times"
        )
    return table


def _flat(places: dict[str, Any]) -> dict[str, int]:
    counts = {place: count for place, count in places.items() if place != "dropped"}
    return counts | {f"dropped: {reason}": count for reason, count in places["dropped"].items()}


def _starvation(told: dict[str, Any]) -> Table:
    table = Table("prompt", "since (s)", "attempts", "last lost as", title="prompts never trained, nor on their way")
    for one in told["first"]:
        table.add_row(str(one["prompt"]), f"{one['since_s']:g}", str(one["attempts"]), escape(one["reason"]))
    table.caption = (
        f"{told['prompts']} prompts; {told['longest_s']:g} s since the first issue at most, "
        f"{told['most_attempts']} attempts at most"
    )
    return table


def _waste(told: dict[str, Any]) -> Table:
    table = Table("generated tokens", "share", title="what became of generated tokens")
    total = told["generated_tokens"]
    parts = {"trained": told["trained_tokens"], "on the way": told["on_the_way_tokens"]}
    parts |= {f"wasted: {reason}": tokens for reason, tokens in told["by_reason"].items()}
    for what, tokens in parts.items():
        table.add_row(escape(what), f"{tokens / total:.1%}")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
