"""`python -m tests.perf SCENARIO [--json]`."""

import importlib
import json
import pkgutil
from typing import Any

import click

import tests.perf
from tests.perf.measure import machine

SCENARIOS = sorted(
    module.name for module in pkgutil.iter_modules(tests.perf.__path__) if module.name not in ("__main__", "measure")
)


@click.command()
@click.argument("scenario", type=click.Choice(SCENARIOS))
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True, help="Alternating runs of each way.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(scenario: str, *, pairs: int, as_json: bool) -> None:
    """Run one benchmark. It wants the machine to itself."""
    results: dict[str, Any] = importlib.import_module(f"tests.perf.{scenario}").run(pairs=pairs)
    about = machine()
    for name, value in {**about, **results}.items():
        click.echo(f"{name:<24} {value}")
    if as_json:
        click.echo(json.dumps({"scenario": scenario, **results, "machine": about}))


main(prog_name="python -m tests.perf")
