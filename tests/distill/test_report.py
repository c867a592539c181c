"""The report: arithmetic by hand, every figure accounted for, partial and damaged runs, a real browser."""

from __future__ import annotations

import html
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import NASTY, build_run

from distill import report as report_module
from distill.film import choose
from distill.film import main as film_main
from distill.report import ReportConfig, collect_films, main, report
from distill.report_card import flatten
from distill.report_html import el, fig, percent_text
from distill.report_page import NAVIGATION, headline
from distill.report_plots import ticks
from distill.report_read import counts, pool, read_rows, wilson
from distill.report_summary import curve, summarise
from distill.report_video import poster, write_mp4
from sims.errors import UserError

ANYWHERE = Path("file")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = build_run(tmp_path_factory.mktemp("runs") / "full")
    report(ReportConfig(run=str(run)))
    return run


# -- arithmetic ---------------------------------------------------------------------------------------------------------


def test_wilson_by_hand():
    # p = .8, n = 10, z = 1.96: centre (.8 + .19207) / 1.38415 = .71674, half 1.96 sqrt(.016 + .0096036) / 1.38415 = .22658
    assert wilson(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 3.84146 / 13.84146), abs=1e-5)
    assert wilson(0, 0) == (0.0, 1.0)


def test_wilson_agrees_with_evaluation():
    from control.evaluate import wilson as evaluated

    for k, n in ((0, 50), (1, 3), (46, 50), (100, 100)):
        assert wilson(k, n) == pytest.approx(evaluated(k, n), abs=1e-6)


def test_pool_sums_and_weighs_cycles_by_successes():
    a = counts({"successes": 3, "episodes": 4, "cycle_steps": 20}, ANYWHERE, 20.0)
    b = counts({"successes": 1, "episodes": 4, "cycle_s": 3.0}, ANYWHERE, 20.0)
    whole = pool([a, None, b])
    assert whole is not None
    assert (whole["successes"], whole["episodes"], whole["rate"]) == (4, 8, 0.5)
    assert whole["cycle_s"] == pytest.approx((3 * 1.0 + 1 * 3.0) / 4)
    assert pool([None]) is None


def test_counts_from_a_rate_and_impossible_counts():
    assert counts({"success": 0.96, "episodes": 50}, ANYWHERE, 20.0)["successes"] == 48  # type: ignore[index]
    assert counts({"success": 0.96}, ANYWHERE, 20.0) is None
    with pytest.raises(UserError, match="7 successes of 5"):
        counts({"successes": 7, "episodes": 5}, ANYWHERE, 20.0)


def test_curve_averages_bins_and_keeps_the_last_step():
    rows = [{"step": i, "success": float(i % 2)} for i in range(1, 161)] + [{"step": 999, "other": 1}]
    found = curve(rows)
    assert found is not None
    assert len(found["step"]) == 80
    assert found["step"][-1] == 160
    assert set(found["success"]) == {0.5}
    assert curve([{"loss": 1.0}]) is None


def test_clock_stands_still_between_calls(tmp_path: Path):
    stages = [
        {"name": "a", "status": "done", "started": 1000.0, "seconds": 60},
        {"name": "b", "status": "done", "started": 1030.0, "seconds": 50},  # beside a, ends at 80
        {"name": "c", "status": "done", "started": 9000.0, "seconds": 10},  # after a long pause
    ]
    (tmp_path / "stages.json").write_text(json.dumps(stages))
    summary = summarise(tmp_path)
    assert [row["begin_s"] for row in summary["stages"]] == [0.0, 30.0, 80.0]
    assert summary["wall_s"] == 90.0


def test_ticks_are_few_and_round():
    assert ticks(120_000) == [0, 50_000, 100_000]
    assert ticks(0) == [0]
    for last in (1, 7, 4450, 99_999, 2e6):
        assert 3 <= len(ticks(last)) <= 5, last


def test_rates_are_written_without_idle_decimals():
    assert [percent_text(x) for x in (0.97, 0.985, 1.0, 0.0)] == ["97\u202f%", "98.5\u202f%", "100\u202f%", "0\u202f%"]


# -- the page -----------------------------------------------------------------------------------------------------------


class Figures(HTMLParser):
    """Values of <data> elements, and text with a digit that stands outside of them and of plot axes."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[tuple[str, str]] = []
        self.values: list[str] = []
        self.loose: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        found = dict(attrs)
        if tag == "data":
            self.values.append(found["value"])
        if tag not in ("meta", "link", "br"):
            self.stack.append((tag, found.get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop()[0] == tag, f"unbalanced </{tag}>"

    def handle_data(self, data: str) -> None:
        exempt = any(tag in ("data", "style", "script") or cls == "axis" for tag, cls in self.stack)
        if not exempt and any(c.isdigit() for c in data):
            self.loose.append(data)


def leaves(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in [key, *leaves(value)]]
    return [leaf for value in node for leaf in leaves(value)] if isinstance(node, list) else [node]


@pytest.mark.parametrize("without", [(), ("deploy", "generalist", "reward")])
def test_every_figure_stands_in_the_summary(tmp_path: Path, without: tuple[str, ...]):
    page = report(ReportConfig(run=str(build_run(tmp_path / "run", without))))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    known = leaves(summary)
    numbers = {float(v) for v in known if isinstance(v, (int, float))}
    texts = [v for v in known if isinstance(v, str)] + [str(v).replace("_", " ") for v in known if isinstance(v, str)]
    found = Figures()
    found.feed(page.read_text())
    assert len(found.values) > 100
    assert [v for v in found.values if float(v) not in numbers] == []
    assert [text for text in found.loose if not any(text.strip() in known for known in texts)] == []


def test_known_figures_are_shown(full: Path):
    page = (full / "report.html").read_text()
    summary = json.loads((full / "summary.json").read_text())
    deployed = summary["deployment"]
    assert (deployed["success"]["successes"], deployed["success"]["episodes"]) == (46, 50)
    assert deployed["realtime"]["episodes"] == 5
    # worst p99 of the five in real time: 412 + 7 * 54
    assert deployed["lateness_us"]["p99"] == 790.0
    assert deployed["gate"]["sent"] == sum(500 + i for i in range(55))
    assert deployed["sentences"][0]["gate_acted"] == 3
    assert '<h1><data value="46">46</data> of <data value="50">50</data> sentences' in page
    lift = next(row for row in summary["specialists"] if row["task"] == "lift")
    assert (lift["success"]["successes"], lift["demonstrator"]["successes"], lift["clone"]["successes"]) == (96, 96, 80)
    assert [row["from_sentence"] for row in summary["specialists"]].count(True) == 1
    assert summary["control_hz"] == 20.0


def test_text_from_files_is_escaped_and_nothing_is_fetched(full: Path):
    page = (full / "report.html").read_text()
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; the &quot;green&quot; button") > 5
    for scheme in ("http:", "https:", 'src="//', "@import", "url("):
        assert scheme not in page, scheme
    assert "default-src 'none'" in html.unescape(page)
    assert page.count("<video ") == 6


def test_element_escapes_attributes_and_children():
    assert el("p", '<b>"', title='"><i>') == '<p title="&quot;&gt;&lt;i&gt;">&lt;b&gt;&quot;</p>'
    assert fig(None) == '<span class="none">–</span>'


PARTS = {
    "specialists": "specialists", "baselines.json": None, "reward": "reward", "dataset": None, "generalist": None,
    "evaluation.json": None, "deploy": "deployment", "videos": "films", "stages.json": "stages",
    "provenance.json": None,
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_shown_as_not_run(tmp_path: Path, part: str):
    run = build_run(tmp_path / "run", (part,))
    if part == "specialists":
        (run / "baselines.json").unlink()
    page = report(ReportConfig(run=str(run))).read_text()
    assert all(f'id="{name}"' in page for name in NAVIGATION)
    if PARTS[part]:
        section = page.split(f'id="{PARTS[part]}"')[1].split("</section>")[0]
        assert "Not run. " in section
    assert "not run" in page.lower() or part in ("dataset", "provenance.json", "generalist")


def test_a_run_that_has_just_begun(tmp_path: Path):
    (tmp_path / "stages.json").write_text("[]")
    page = report(ReportConfig(run=str(tmp_path))).read_text()
    assert "Nothing has been measured yet" in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {row["met"] for row in summary["targets"]} == {None}


def test_a_nested_card_becomes_rows(full: Path):
    nested = {"seen": {"press": {"auroc": 0.9, "concepts": [{"object": "the button", "auroc": 0.8, "family": "x"}]}}}
    assert list(flatten(nested)) == [
        (("seen", "press"), {"auroc": 0.9}),
        (("seen", "press", "the button"), {"auroc": 0.8}),
    ]
    summary = json.loads((full / "summary.json").read_text())
    assert summary["reward_auroc"] == {"seen": pytest.approx((0.981 + 0.967 + 0.975) / 3), "unseen": 0.951}
    assert summary["reward_model"]["sets"]["seen"]["reach"]["near_miss"] is None  # was nan


def test_headline_names_the_furthest_stage(full: Path):
    summary = summarise(full)
    assert "sentences obeyed by one policy" in headline(summary)
    summary["deployment"] = None
    assert "unseen phrasings obeyed" in headline(summary)
    summary["generalist"] = None
    assert "specialists, weakest at" in headline(summary)


def test_a_missed_target_is_marked(tmp_path: Path):
    run = build_run(tmp_path / "run")
    weak = {"cells": [{"axis": "swapped", "variant": "press_green", "successes": 84, "episodes": 100}]}
    (run / "evaluation.json").write_text(json.dumps(weak))
    rows = {row["name"]: row["met"] for row in summarise(run)["targets"]}
    assert rows["Generalist, sentence swapped"] is False
    assert rows["Generalist, unseen phrasings"] is None
    assert rows["Sentences obeyed once deployed"] is True


# -- damage and mistakes ------------------------------------------------------------------------------------------------


def test_a_torn_last_line_is_dropped_and_a_torn_middle_is_named(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert read_rows(path) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": 2\n{"a": 3}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl: line 2"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("evaluation.json", "{"),
        ("evaluation.json", '{"cells": [3]}'),
        ("reward/card.json", "[]"),
        ("deploy/results.jsonl", "[1]\n{}\n"),
        ("specialists/reach/result.json", '{"successes": 9, "episodes": 3}'),
        ("specialists/reach/config.yaml", "a: [1"),
        ("videos/reach.mp4", "no video"),
    ],
)
def test_damage_is_one_message_and_leaves_the_old_report(
    full: Path, tmp_path: Path, name: str, content: str, capsys: Any
):
    run = tmp_path / "run"
    shutil.copytree(full, run)
    before = (run / "report.html").read_bytes()
    (run / name).write_text(content)
    assert main([f"run={run}"]) == 2
    error = capsys.readouterr().err
    assert Path(name).name in error
    assert "Traceback" not in error
    assert (run / "report.html").read_bytes() == before


def test_mistakes_name_what_was_found(full: Path, tmp_path: Path, capsys: Any):
    assert main([f"run={full.parent / 'ful'}"]) == 2
    assert str(full) in capsys.readouterr().err
    assert main([f"run={tmp_path}"]) == 2
    assert "is not a run" in capsys.readouterr().err
    assert main(["embed_mb=-1"]) == 2
    assert "embed_mb=-1" in capsys.readouterr().err
    assert main(["+embedd=1"]) == 2
    assert "embed" in capsys.readouterr().err


def test_the_verb_writes_both_files(full: Path, capsys: Any):
    (full / "summary.json").unlink()
    assert main([f"run={full}"]) == 0
    assert "report.html" in capsys.readouterr().out
    assert (full / "summary.json").exists()
    assert report_module.VERB.name == "report"


# -- films --------------------------------------------------------------------------------------------------------------


def test_films_within_the_budget_are_embedded_smallest_first(full: Path):
    sizes = sorted(path.stat().st_size for path in (full / "videos").glob("*.mp4"))
    rows, films = collect_films(full / "videos", sizes[0] + sizes[1])
    assert len(rows) == 6
    assert sum(row["embedded"] for row in rows) == len(films) == 2
    assert [row["title"] for row in rows[:2]] == ["deployed sentence 3", "deployed sentence 9"]


def test_mp4_is_h264_of_the_same_length(tmp_path: Path):
    import av

    frames = np.zeros((7, 31, 48, 3), np.uint8)  # an odd height loses its last row
    frames[:, :, :24] = (200, 30, 30)
    path = write_mp4(frames, tmp_path / "a.mp4", 20.0)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.average_rate) == ("h264", 20)
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(pictures) == 7
    assert pictures[3].shape == (30, 48, 3)
    assert np.abs(pictures[3][:, :20].astype(int) - (200, 30, 30)).mean() < 8
    assert poster(path)[:2] == b"\xff\xd8"
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize(
    "frames", [np.zeros((0, 8, 8, 3), np.uint8), np.zeros((2, 8, 8, 3)), np.zeros((8, 8, 3), np.uint8)]
)
def test_frames_of_another_kind_are_refused(tmp_path: Path, frames: np.ndarray):
    with pytest.raises(UserError, match=r"\(T, H, W, 3\) uint8"):
        write_mp4(frames, tmp_path / "a.mp4", 20.0)


def test_an_episode_is_filmed(tmp_path: Path):
    from distill.report_film import FilmRenderer, record_episode
    from sims.registry import make
    from sims.tasks import TASKS

    try:
        renderer = FilmRenderer((48, 64))
    except UserError as error:
        pytest.skip(f"this machine cannot draw offscreen: {error}")
    env: Any = make("tabletop/press", 1, time_limit=30)
    seen = record_episode(
        env, TASKS["press"].demonstrator(env).act, "press_yellow", seed=3, renderer=renderer, hold_s=0.2
    )
    renderer.close()
    env.close()
    assert seen.frames.shape == (30 + 4, 48, 64, 3)
    assert "yellow" in seen.sentence
    moved = np.abs(seen.frames[0].astype(int) - seen.frames[-1]).max(axis=-1) > 40
    assert moved.sum() > 30  # the arm went somewhere
    assert (seen.frames[-1] == seen.frames[-4]).all()


def test_sentences_to_film_differ_and_show_a_failure():
    def row(index: int, variant: str, success: bool, **more: Any) -> dict[str, Any]:
        return {"index": index, "variant": variant, "success": success, "trajectory": "t.npz", **more}

    rows = [
        row(0, "reach", True),
        row(1, "reach", True),
        row(2, "lift_red", True),
        row(3, "reach", False),
        row(4, "reach", False),
    ]
    rows += [row(5, "move_red", True, realtime=True), {**row(6, "move_red", True), "trajectory": None}]
    assert [r["index"] for r in choose(rows, 3)] == [0, 2, 3]
    assert [r["index"] for r in choose(rows, 9)] == [0, 2, 1, 4, 3]
    assert choose(rows, 0) == []


def test_deployed_trajectories_are_filmed(tmp_path: Path, capsys: Any):
    from sims.worlds.tabletop import sample_layout

    layout = sample_layout(np.random.default_rng(0))
    arrays = {"qpos": np.tile(layout.qpos, (4, 1)), "mocap": np.tile(layout.mocap, (4, 1))}
    np.savez(tmp_path / "t.npz", **arrays)
    line = {
        "index": 7,
        "sentence": NASTY,
        "variant": "reach",
        "success": False,
        "realtime": False,
        "trajectory": "t.npz",
    }
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    status = film_main([f"deploy={tmp_path}", f"out={tmp_path / 'videos'}"])
    if "cannot draw offscreen" in capsys.readouterr().err:
        pytest.skip("this machine cannot draw offscreen")
    assert status == 0
    rows, films = collect_films(tmp_path / "videos", 1e6)
    assert [(r["file"], r["sentence"], r["success"]) for r in rows] == [("deployed-0007.mp4", NASTY, False)]
    assert films["deployed-0007.mp4"][1][:2] == b"\xff\xd8"


def test_nothing_to_film_is_a_mistake(tmp_path: Path, capsys: Any):
    assert film_main([]) == 2
    assert "nothing to film" in capsys.readouterr().err
    assert film_main([f"deploy={tmp_path}"]) == 2
    assert "no trajectory" in capsys.readouterr().err


# -- a real browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra: test)")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless=new no-sandbox disable-gpu disable-background-networking disable-component-update disable-sync no-first-run"
    for flag in [*flags.split(), f"user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    yield window
    window.quit()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_opens_without_errors_or_overflow(full: Path, browser: Any, width: int, scheme: str):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get((full / "report.html").resolve().as_uri())
    ready = "const v = [...document.querySelectorAll('video')]; return v.length && v.every(x => x.readyState > 0 || x.error)"
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20).until(lambda window: window.execute_script(ready))
    assert browser.get_log("browser") == []
    assert browser.execute_script("return [...document.querySelectorAll('video')].filter(v => v.error).length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert NASTY in browser.execute_script("return document.body.innerText")
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(r => r.name.slice(0, 5))")
    assert set(loaded) <= {"data:"}
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor") != "rgb(251, 250, 248)"
    assert dark is (scheme == "dark")
