"""Names of the user's choice: LaTeX reads the mathematics in them, page and charts show plain text."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.compare.__main__ import main
from benchmarks.reporting.booktabs import with_maths
from tests.benchmarks.made_runs import LOCALLY, make_run


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (r"FedProx ($\mu=0.1$)", r"FedProx ($\mu=0.1$)"),
        (r"a_b $x_1$ c_d $y^2$", r"a\_b $x_1$ c\_d $y^2$"),
        (r"$\frac{1}{2}$", r"$\frac{1}{2}$"),
        (r"$\{x\}$ \$5", r"$\{x\}$ \textbackslash{}\$5"),
        ("5 $", r"5 \$"),
        ("from $5 to $10", r"from \$5 to \$10"),
        ("$x^$ and $", r"$x^$ and \$"),
        ("$a & b$", r"\$a \& b\$"),
        ("$a % b$", r"\$a \% b\$"),
        ("${x$", r"\$\{x\$"),
        ("$}x{$", r"\$\}x\{\$"),
        (r"$a \\ b$", r"\$a \textbackslash{}\textbackslash{} b\$"),
        ("$a\nb$", r"\$aU+FFFDb\$"),
        ("$$", r"\$\$"),
    ],
)
def test_mathematics_stays_where_latex_can_read_it(name: str, expected: str) -> None:
    assert with_maths(name) == expected


@pytest.mark.usefixtures("one_chart")
def test_only_names_of_the_users_choice_have_mathematics(tmp_path: Path) -> None:
    runs, names = tmp_path / "$x$", tmp_path / "names.yaml"
    make_run(runs / "a")
    make_run(runs / "b", "fl-r-17", "--federated.algorithm=ditto")
    make_run(runs / "c", "fl-r-17", "--setting=not $named$")
    make_run(runs / "d", "pfl-r-17", *LOCALLY)
    chosen = {
        "FL-R-17": r"FedProx ($\mu=0.1$)",
        "FL-R-17, algorithm ditto": "costs $5",
        "PFL-R-17": r"Ours, $\epsilon$",
        "0.1": r"$\eta = 0.1$",
    }
    names.write_text(yaml.safe_dump(chosen))
    out = tmp_path / "out"
    main([str(runs), f"--output_dir={out}", "--columns", "local.learning_rate", f"--names={names}"])
    for name in ("table.tex", "crossed.tex", "classes.tex"):
        text = (out / name).read_text()
        assert r"FedProx ($\mu=0.1$)" in text
        assert r"costs \$5" in text
        assert r"not \$named\$" in text
    crossed = (out / "crossed.tex").read_text()
    assert r"& $\eta = 0.1$ \\" in crossed
    assert r"Ours, $\epsilon$, $\eta = 0.1$: epsilon 8 for one update" in crossed
    assert r"FedProx ($\mu=0.<wbr>1$)" in (out / "compare.html").read_text()
    assert len(list((out / "charts").glob("*.pdf"))) == 1
