"""Curves come from the CSV alone."""

from __future__ import annotations

from pathlib import Path

from eagle3lab.experiments.plots import plot_curves, plot_intervals, read_metrics


def test_empty_cells_and_nan_are_no_points(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("update,train/loss,val/loss\n1,2.5,\n2,nan,\n2,,1.5\n")
    assert read_metrics(tmp_path / "m.csv") == {"train/loss": [(1.0, 2.5)], "val/loss": [(2.0, 1.5)]}


def test_the_same_metrics_give_the_same_picture(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("update,train/loss,val/acceptance_step0\n1,2.5,0.1\n2,2.0,0.2\n")
    for name in ("a.png", "b.png"):
        plot_curves(tmp_path / "m.csv", tmp_path / name, "run")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_intervals_are_drawn_for_every_panel_and_column(tmp_path: Path) -> None:
    points = [("B", 1.5, 1.4, 1.6), ("A", 1.4, 1.3, 1.5)]
    panels = {"demo, k=3": [points, [("B", 0.1, -0.1, 0.3)]], "demo, k=5": [points, []]}
    for name in ("a.png", "b.png"):
        columns = [("length", None), ("difference", 0.0)]
        plot_intervals(panels, tmp_path / name, columns=columns, legend=["A: " + "long " * 60])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png"]
