"""What the private runs of a group guarantee, in the cells of a table."""

from __future__ import annotations

from benchmarks.compare.groups import Group
from benchmarks.core.privacy_statement import rounded_up, shown
from benchmarks.reporting.runs import epsilon_of, local_epsilon_of, statements_of, unprotected


def in_short(group: Group) -> str:
    """The epsilon of a group, and of how many runs the noise can be subtracted; ``none`` without privacy."""
    cells = privacy_of(group)
    if cells is None:
        return "none"
    seeded = unprotected(statements_of(group.finished))
    return f"{cells[1]}; {seeded}" if seeded else cells[1]


def privacy_of(group: Group) -> list[str] | None:
    """Kind, epsilon, delta, noise multiplier and clipping bound, of the seed with the largest epsilon.

    None without privacy. Where the noise of a run can be subtracted, the kind says so.
    """
    config = group.runs[0].config
    section = config.privacy or config.local_privacy
    if section is None:
        return None
    kind = "central" if config.local_privacy is None else "local, on each device"
    bound = f"{section.clipping_bound:g}"
    bound += ", adapted" if getattr(section, "mechanism", "") == "adaptive" else ""
    known = statements_of(group.finished)
    if seeded := unprotected(known):
        kind += f", {seeded}"
    if not known:
        return [kind, f"{section.epsilon:g} asked for, not finished", "–", "–", bound]
    if config.local_privacy is not None:
        one, delta, most, spent = max(map(local_epsilon_of, known), key=lambda found: found[3])
        epsilon = f"{shown(one)} for one update; {shown(spent)} for who took part most, in {most} rounds"
        noise = known[0].get("noise_multiplier")
    else:
        total, delta, simulated, executed = max(map(epsilon_of, known))
        epsilon = shown(total) + (f" simulated, {shown(executed)} as executed" if simulated else "")
        system = known[0].get("simulated_system") or known[0]["as_executed"]
        noise = system.get("noise_multiplier")
    multiplier = f"{noise:.4g}" if isinstance(noise, (int, float)) else "–"
    if known[0].get("simulated_system"):
        multiplier += ", of the simulated system"
    return [kind, epsilon, rounded_up(delta), multiplier, bound]
