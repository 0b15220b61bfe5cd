"""docs/fault-matrix.md lists tests that exist, and is what its generator writes."""

import ast
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import fault_matrix

        return fault_matrix
    finally:
        sys.path.remove(str(ROOT / "docs"))


def names_in(nodes: list[ast.stmt]) -> set[str]:
    """What a module's or class's body defines: functions, classes, and names that are assigned."""
    assigned = {one.id for node in nodes if isinstance(node, ast.Assign) for one in node.targets if hasattr(one, "id")}
    return assigned | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_listed_test_exists(matrix: ModuleType) -> None:
    # By reading the files: collecting them would import half the project once more. The generator itself collects.
    missing = []
    for test in matrix.test_ids():
        path, *parts = test.split("::")
        nodes = ast.parse((ROOT / path).read_text(encoding="utf-8")).body if (ROOT / path).is_file() else []
        for part in parts:
            if part not in names_in(nodes):
                missing.append(test)
                break
            nodes = next((node.body for node in nodes if isinstance(node, ast.ClassDef) and node.name == part), [])
    assert missing == []


def test_the_page_is_up_to_date(matrix: ModuleType) -> None:
    assert matrix.stale(matrix.TARGET.read_text(encoding="utf-8")) == ""


def test_every_kind_is_tried_or_says_why_not(matrix: ModuleType) -> None:
    assert len(matrix.ROWS) > 60
    assert [row.kind for row in matrix.ROWS if not (row.tests or row.missing)] == []
    assert {row.probe for row in matrix.ROWS} - {""} == set(matrix.PROBES)


def test_results_are_the_worst_of_the_cases(matrix: ModuleType, tmp_path: Path) -> None:
    one, two, three, *_ = matrix.test_ids()
    suite = ET.Element("testsuite")

    def case(test: str, parameter: str, child: str = "", **attributes: str) -> None:
        path, _, name = test.partition("::")
        attribute = {"classname": path.removesuffix(".py").replace("/", "."), "name": f"{name}[{parameter}]"}
        element = ET.SubElement(suite, "testcase", attribute)
        if child:
            ET.SubElement(element, child, attributes)

    case(one, "a")
    case(one, "b", "failure")
    case(two, "a", "skipped", type="pytest.xfail")
    case(two, "b")
    case(three, "a")
    ET.ElementTree(suite).write(tmp_path / "report.xml")
    results = matrix.results_from(tmp_path / "report.xml")
    assert [results[test] for test in (one, two, three)] == ["FAILED", "known defect", "passed"]
    page = matrix.render(results)
    assert matrix.results_in(page) == results
    assert "no good result" in matrix.stale(page)
    assert "is not what" in matrix.stale(page.replace("passed", "passed |", 1))
