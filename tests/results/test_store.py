"""Measurements are kept line by line, survive a crash, and are never mixed over labels."""

import fcntl
import json
import multiprocessing
import statistics
import threading
import warnings

import pytest

from labsupport import results
from labsupport.results import RunManifest, Store, Table, measured, predicted

RUN = RunManifest.collect(
    dataset_sha256="d",
    tokenizer_sha256="t",
    config={"steps": 3},
    strategy="ddp",
    world_size=2,
    seed=0,
    hardware="one H200",
)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "deep" / "steps.jsonl")


@pytest.fixture
def table(store):
    for strategy, times in (("ddp", (0.30, 0.10, 0.20)), ("fsdp", (0.40,))):
        for time in times:
            store.add(measured("step", time, "s", on="2 gloo ranks"), RUN, strategy=strategy)
    store.add(predicted("step", 0.15, "s", by="a formula"), strategy="ddp", blocks=4)
    store.add(measured("memory", 3 * 2**20, "bytes", on="2 gloo ranks"))
    store.add(measured("equal", True, on="2 gloo ranks"))
    return store.load()


def test_what_was_added_is_loaded(table):
    assert len(table) == 7
    first = table.rows[0]
    assert first.quantity == measured("step", 0.30, "s", on="2 gloo ranks")
    assert first.manifest == RUN
    assert first.tags == {"strategy": "ddp"}
    assert table.columns == ("name", "value", "unit", "label", "source", "strategy", "blocks")
    assert table.column("blocks") == [None] * 4 + [4, None, None]
    assert table.rows[5].manifest is None


def test_rows_are_chosen_by_label_name_and_tag(table):
    assert len(table.where(label="measured")) == 6
    assert len(table.where(name="step", strategy="ddp")) == 4
    assert len(table.where(label="measured", name="step", strategy="ddp")) == 3
    assert len(table.where(blocks=5)) == 0


def test_aggregates_keep_the_label(table):
    ddp = table.where(label="measured", strategy="ddp")
    assert ddp.median() == measured("step", 0.20, "s", on="2 gloo ranks")
    assert ddp.aggregate(max).value == 0.30
    assert ddp.aggregate(statistics.mean).value == pytest.approx(0.2)
    faster = table.where(label="measured", strategy="fsdp").ratio(ddp)
    assert (faster.value, faster.unit, faster.label) == (2.0, "", "measured")


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"name": "step"}, r"2 values of label \('measured', 'predicted'\).*\.where\(label='meas"),
        ({"label": "measured"}, r"3 values of name .*must not be mixed; choose one first"),
        ({"name": "none"}, r"no rows; save some with Store\(path\)\.add"),
        ({"name": "equal"}, "'equal' is True: no number"),
    ],
)
def test_what_must_not_be_mixed_is_refused(table, mix, message):
    with pytest.raises(ValueError, match=message):
        table.where(**mix).median()


def test_units_and_sources_are_not_mixed_either(store):
    store.add(measured("x", 1.0, "s", on="a"))
    store.add(measured("x", 1.0, "bytes", on="a"))
    store.add(measured("x", 1.0, "s", on="b"))
    table = store.load()
    with pytest.raises(ValueError, match=r"\('s', 'bytes'\).*where\(unit='s'\)"):
        table.median()
    with pytest.raises(ValueError, match=r"where\(source='a'\)"):
        table.where(unit="s").median()
    with pytest.raises(ValueError, match="2 values of unit"):
        table.where(unit="s", source="a").ratio(table.where(unit="bytes"))


def test_a_ratio_of_two_labels_is_refused(table):
    seen = table.where(label="measured", strategy="ddp")
    with pytest.raises(ValueError, match="2 values of label"):
        seen.ratio(table.where(label="predicted"))
    with pytest.raises(ValueError, match="no rows"):
        seen.ratio(Table())


def test_tables_show_themselves(table, store):
    lines = repr(table).splitlines()
    assert lines[0].split() == ["name", "value", "label", "source", "strategy", "blocks"]
    assert lines[1].split() == ["step", "300", "ms", "measured", "2", "gloo", "ranks", "ddp"]
    assert "3 MiB" in repr(table)
    store.add(measured("a < b", 1), note="<b>")
    page = store.load()._repr_html_()
    assert page.count("<tr>") == 9
    assert "<td>a &lt; b</td>" in page
    assert "<b>" not in page
    many = Table(table.rows * 5)
    assert repr(many).endswith("… and 15 more rows")
    assert "… and 15 more rows" in many._repr_html_()
    assert repr(Table()) == "no rows"
    assert "no rows" in Table()._repr_html_()


def test_an_unknown_column_is_refused(table):
    with pytest.raises(ValueError, match="'speed' is unknown; choose one of name, value"):
        table.column("speed")


def test_a_tag_must_not_hide_a_field(store):
    with pytest.raises(ValueError, match="tag 'label' is a field of its own"):
        store.add(measured("x", 1), label="emulated")
    with pytest.raises(ValueError, match=r"tag 'sizes' is \[1\]; it must be one number"):
        store.add(measured("x", 1), sizes=[1])


def test_nan_and_infinity_come_back(store):
    store.add(measured("loss", float("inf")))
    assert store.load().rows[0].quantity.value == float("inf")


def add_many(path, worker):
    for i in range(50):
        Store(path).add(measured("x", i, on="y" * 5000), worker=worker)


def test_processes_may_add_at_once(store):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=add_many, args=(store.path, n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    table = store.load()
    assert len(table) == 200
    for n in range(4):
        assert [row.quantity.value for row in table.where(worker=n)] == list(range(50))


def test_a_process_waits_for_another_that_is_writing(store):
    store.add(measured("x", 1))
    before = store.path.read_bytes()
    with open(store.path, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=store.add, args=(measured("x", 2),))
        waiting.start()
        waiting.join(timeout=0.2)
        assert store.path.read_bytes() == before
    waiting.join(timeout=10)
    assert store.load().column("value") == [1, 2]


@pytest.mark.parametrize("keep", [1, 40, -1])
def test_a_line_cut_off_by_a_crash_is_reported_and_left_out(store, keep):
    store.add(measured("x", 1))
    store.add(measured("x", 2))
    whole = store.path.read_bytes()
    first = whole.index(b"\n") + 1
    store.path.write_bytes(whole[:first] + whole[first:-1][:keep])
    with pytest.warns(UserWarning, match=r"steps\.jsonl: line 2 damaged and left out"):
        assert len(store.load()) == 1
    store.add(measured("x", 3))
    with pytest.warns(UserWarning, match="line 2 damaged"):
        assert store.load().column("value") == [1, 3]


def test_a_line_of_another_kind_is_reported(store):
    store.add(measured("x", 1))
    with open(store.path, "a") as file:
        file.write('[1]\n{"name": "x"}\n')
    with pytest.warns(UserWarning, match="lines 2, 3 damaged"):
        assert len(store.load()) == 1


def test_no_file_is_an_empty_table(store):
    assert len(store.load()) == 0


def test_recorded_runs_say_where_and_when(tmp_path, monkeypatch):
    kept = Store(tmp_path / "gpu.jsonl")
    kept.add(measured("mfu", 0.4, on="1 nccl rank"), RUN, strategy="ddp")
    kept.add(predicted("mfu", 0.5, by="a formula"), RUN)
    kept.add(measured("mfu", 0.3, on="1 nccl rank on one H200"))
    kept.add(results.recorded("mfu", 0.2, on="a box", date="2026-01-31"))
    monkeypatch.setenv("LABSUPPORT_RECORDED", str(tmp_path))
    table = results.recorded_runs()
    assert table.column("label") == ["recorded", "predicted", "recorded", "recorded"]
    today = json.loads(kept.path.read_text().splitlines()[0])["saved_at"][:10]
    assert table.column("source") == [
        f"1 nccl rank, one H200, {RUN.started_at[:10]}",
        "a formula",
        f"1 nccl rank on one H200, {today}",
        "a box, 2026-01-31",
    ]
    assert table.rows[0].tags == {"strategy": "ddp"}
    assert table.rows[0].manifest == RUN


def test_without_recordings_the_table_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("LABSUPPORT_RECORDED", str(tmp_path / "none"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(results.recorded_runs()) == 0
    monkeypatch.delenv("LABSUPPORT_RECORDED")
    assert (results.recordings.recorded_folder().parent / "labsupport").is_dir()
