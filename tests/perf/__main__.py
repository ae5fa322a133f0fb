"""`python -m tests.perf SCENARIO [--json] [--plot FILE.png]`."""

import importlib
import importlib.util
import inspect
import json
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import outbox
import tests.perf
from tests.perf.measure import machine

SCENARIOS = sorted(
    module.name
    for module in pkgutil.iter_modules(tests.perf.__path__)
    if module.name not in ("__main__", "measure") and not module.ispkg
)


@click.command()
@click.argument("scenario", type=click.Choice(SCENARIOS))
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True, help="Alternating runs of each way.")
@click.option(
    "--wake/--no-wake", default=hasattr(outbox, "wake_relay"), show_default=True, help="With wake-ups (latency, enqueue)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw it, where a curve says more.")
def main(scenario: str, *, pairs: int, wake: bool, as_json: bool, plot: Path | None) -> None:
    """Run one benchmark. It wants the machine to itself."""
    module = importlib.import_module(f"tests.perf.{scenario}")
    if plot is not None:
        _check_plot(module)
    options = {"wake": wake} if "wake" in inspect.signature(module.run).parameters else {}
    results: dict[str, Any] = module.run(pairs=pairs, **options)
    about = machine()
    for name, value in {**about, **results}.items():
        click.echo(f"{name:<30} {value}")
    if plot is not None:
        module.plot(results, plot)
    if as_json:
        click.echo(json.dumps({"scenario": scenario, **results, "machine": about}))


def _check_plot(module: ModuleType) -> None:
    """Raise before anything is measured if it cannot be drawn."""
    if not hasattr(module, "plot"):
        raise click.UsageError("this scenario has no curve; leave --plot out")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install --group bench")


if __name__ == "__main__":  # the processes that a benchmark starts load this module too
    main(prog_name="python -m tests.perf")
