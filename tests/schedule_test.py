"""The orders of slices, the model of their times, and what is said of them."""

import doctest
import functools
import itertools
import pathlib
import re

from absl.testing import absltest, parameterized

from jax_overlap import _timeline, schedule

HEADER = pathlib.Path(__file__).parent.parent / "ffi" / "core" / "schedule.h"
MATMULS = ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")
# Ops whose slots are added, and those whose slices, or sums, go to every rank.
SCATTERS = ("matmul_reduce_scatter", "matmul_all_reduce", "psum", "psum_scatter")
GATHERS = ("all_gather_matmul", "matmul_all_reduce", "psum", "all_gather")
RATIOS = (0, 0.5, 0.8, 1, 1.3, 2)


def of_kind(spans, *kinds):
    return [span for span in spans if span.kind in kinds]


class Slices(parameterized.TestCase):
    @parameterized.product(parts=(1, 2, 3, 8), align=(1, 16))
    def test_cover_everything_once(self, parts, align):
        for n, subs in itertools.product((0, 1, 7, 16, 255, 1030), (1, 2, 3)):
            covered = []
            for i, j in itertools.product(range(parts), range(subs)):
                whole = schedule.slice_of(n, parts, i, align)
                part = schedule.sub_slice_of(whole, subs, j, align)
                self.assertTrue(part.start % align == 0 or not part, (n, part))
                covered += part
            self.assertEqual(covered, list(range(n)))

    def test_rows_that_do_not_divide(self):
        self.assertEqual(schedule.slice_of(1030, 4, 0), range(258))
        self.assertEqual(schedule.slice_of(1030, 4, 3), range(774, 1030))
        self.assertEqual(schedule.slice_of(3, 4, 3), range(3, 3))
        self.assertEqual(
            schedule.sub_slice_of(range(774, 1030), 3, 2), range(946, 1030)
        )


class Orders(parameterized.TestCase):
    @parameterized.parameters(
        (schedule.own_first, schedule.own_first_step),
        (schedule.own_last, schedule.own_last_step),
    )
    def test_each_slice_once_and_no_two_ranks_alike(self, order, step_of):
        for size in range(1, 34):
            everything = list(range(size))
            for i in range(size):
                of_rank = [order(i, step, size) for step in range(size)]
                self.assertEqual(sorted(of_rank), everything)
                in_step = [order(rank, i, size) for rank in range(size)]
                self.assertEqual(sorted(in_step), everything)
                steps = [step_of(i, slice, size) for slice in of_rank]
                self.assertEqual(steps, everything)

    def test_as_in_the_paper(self):
        """Operands arrive: r, r-1, r-2, ..; results leave: r-1, r-2, .., r."""
        for size in range(1, 34):
            for rank, step in itertools.product(range(size), repeat=2):
                self.assertEqual(
                    schedule.own_first(rank, step, size), (rank - step) % size
                )
                self.assertEqual(
                    schedule.own_last(rank, step, size), (rank - 1 - step) % size
                )


class Twins(parameterized.TestCase):
    """What C++ returns, taken from its source, is what Python returns."""

    @parameterized.parameters(
        ("Rotated", schedule.rotated),
        ("OwnFirst", schedule.own_first),
        ("OwnLast", schedule.own_last),
        ("OwnFirstStep", schedule.own_first_step),
        ("OwnLastStep", schedule.own_last_step),
    )
    def test_orders(self, name, twin):
        arguments, formula = re.search(
            rf"^JO_HD int {name}\((.*)\) {{ return (.*); }}$",
            HEADER.read_text(),
            re.M,
        ).groups()
        names = arguments.replace("int ", "")
        # Nothing here is negative, for which % differs between the languages.
        cpp = eval(f"lambda {names}: {formula}")
        for size in range(1, 34):
            for rank, other in itertools.product(range(size), repeat=2):
                self.assertEqual(cpp(rank, other, size), twin(rank, other, size))

    def test_slices(self):
        text = HEADER.read_text()
        for line in (
            "return (a + b - 1) / b;",
            "return CeilDiv(a, b) * b;",
            "step = RoundUp(CeilDiv(n, static_cast<size_t>(parts)), align);",
            "return {Min(n, step * static_cast<size_t>(index)),",
            "Min(n, step * (static_cast<size_t>(index) + 1))};",
            "part = SliceOf(slice.size(), parts, index, align);",
            "return {slice.begin + part.begin, slice.begin + part.end};",
        ):
            self.assertIn(line, text)
        for n, parts, align in itertools.product((0, 5, 1030), (1, 3, 8), (1, 16)):
            step = ((n + parts - 1) // parts + align - 1) // align * align
            for index in range(parts):
                self.assertEqual(
                    schedule.slice_of(n, parts, index, align),
                    range(min(n, step * index), min(n, step * (index + 1))),
                )


def on_timelines(*ops, subs=(1, 2, 3), ratios=RATIOS, **kw):
    """Runs a test on the timelines of these ops for 1 to 9 ranks."""

    def decorate(test):
        @functools.wraps(test)
        def run(self):
            for op, ranks, sub in itertools.product(ops, range(1, 10), subs):
                for ratio in ratios if op in MATMULS else (None,):
                    try:
                        test(self, _timeline.timeline(op, ranks, sub, ratio, **kw))
                    except AssertionError as error:
                        error.add_note(f"{op}, {ranks=}, {sub=}, {ratio=}")
                        raise

        return run

    return decorate


class Timelines(parameterized.TestCase):
    @on_timelines("all_gather_matmul", "matmul_reduce_scatter", add=0)
    def test_total_is_as_derived(self, t):
        over = (t.ranks - 1) * (t.ratio - 1) - (1 - 1 / t.sub_slices)
        waits = max(0, over) if t.ranks > 1 else 0
        self.assertAlmostEqual(t.total, t.ranks + waits)
        for rank in range(t.ranks):
            self.assertAlmostEqual(t.time(rank, "wait"), waits)

    @on_timelines("psum", "psum_scatter", "all_gather", add=0)
    def test_total_without_a_matmul(self, t):
        """P-1 transfers a phase."""
        phases = 2 if t.op == "psum" else 1
        self.assertAlmostEqual(t.total, phases * (t.ranks - 1))

    @on_timelines("matmul_all_reduce", subs=(1,), add=0)
    def test_total_of_an_all_reduce(self, t):
        """The transfers of the sums are hidden by nothing."""
        tail = max(0, (t.ranks - 1) * (t.ratio - 1))
        gather = (t.ranks - 1) * t.ratio
        self.assertAlmostEqual(t.total, t.ranks + tail + gather)

    @on_timelines("matmul_reduce_scatter", ratios=(0.8,), add=0.1)
    def test_adding_comes_on_top(self, t):
        adds = t.ranks * 0.1 if t.ranks > 1 else 0
        self.assertAlmostEqual(t.total, t.ranks + adds)

    @on_timelines("all_gather_matmul", "matmul_reduce_scatter", ratios=(0, 0.5, 0.8, 1))
    def test_no_tail_where_sending_is_not_slower(self, t):
        for spans in t.spans:
            self.assertEmpty(of_kind(spans, "wait"))

    @on_timelines(*MATMULS)
    def test_the_order_of_slices(self, t):
        order = schedule.own_last
        if t.op == "all_gather_matmul":
            order = schedule.own_first
        for rank, spans in enumerate(t.spans):
            self.assertEqual(
                [(s.slice, s.sub) for s in of_kind(spans, "compute")],
                [
                    (order(rank, step, t.ranks), sub)
                    for step in range(t.ranks)
                    for sub in range(t.sub_slices)
                ],
            )

    @on_timelines(*_timeline.OPS)
    def test_everything_is_sent_once(self, t):
        others = t.ranks - 1
        for rank, spans in enumerate(t.spans):
            partials = {
                (peer, peer, sub)
                for peer in range(t.ranks)
                for sub in range(t.sub_slices)
                if peer != rank and t.op in SCATTERS
            }
            own = {
                (rank, peer, sub)
                for peer in range(t.ranks)
                for sub in range(t.sub_slices)
                if peer != rank and t.op in GATHERS
            }
            sends = [(s.slice, s.peer, s.sub) for s in of_kind(spans, "send")]
            self.assertCountEqual(sends, [*partials, *own])
            phases = (t.op in SCATTERS) + (t.op in GATHERS)
            self.assertLen(sends, phases * others * t.sub_slices)

    @on_timelines(*_timeline.OPS)
    def test_in_a_step_the_destinations_differ(self, t):
        sends = [of_kind(spans, "send") for spans in t.spans]
        for step in zip(*sends, strict=True):
            self.assertLen({send.peer for send in step}, t.ranks)
            self.assertLen({round(send.start, 6) for send in step}, 1)

    @on_timelines(*_timeline.OPS)
    def test_slots_are_added_in_rank_order(self, t):
        slots = range(t.ranks if t.op in SCATTERS and t.ranks > 1 else 0)
        for rank, spans in enumerate(t.spans):
            self.assertEqual(
                [(s.slice, s.sub, s.peer) for s in of_kind(spans, "reduce")],
                [(rank, sub, slot) for sub in range(t.sub_slices) for slot in slots],
            )

    @on_timelines(*_timeline.OPS)
    def test_worker_and_link_do_one_thing_at_a_time(self, t):
        for spans in t.spans:
            for kinds in (("compute", "wait", "reduce"), ("send",)):
                lane = of_kind(spans, *kinds)
                for before, after in itertools.pairwise(lane):
                    self.assertLessEqual(before.end, after.start + 1e-9)

    @on_timelines(*_timeline.OPS)
    def test_the_worker_is_never_idle_without_a_wait(self, t):
        for spans in t.spans:
            busy = of_kind(spans, "compute", "wait", "reduce")
            length = sum(span.end - span.start for span in busy)
            self.assertAlmostEqual(length, busy[-1].end if busy else 0)

    @on_timelines(*_timeline.OPS)
    def test_nothing_is_used_before_it_has_come(self, t):
        arrived = {
            (send.peer, source, send.slice, send.sub): send.end
            for source, spans in enumerate(t.spans)
            for send in of_kind(spans, "send")
        }
        for rank, spans in enumerate(t.spans):
            for span in of_kind(spans, "reduce"):
                if span.peer != rank:
                    needed = arrived[rank, span.peer, rank, span.sub]
                    self.assertGreaterEqual(span.start, needed - 1e-9)
            for span in of_kind(spans, "compute"):
                if t.op == "all_gather_matmul" and span.slice != rank:
                    needed = arrived[rank, span.slice, span.slice, span.sub]
                    self.assertGreaterEqual(span.start, needed - 1e-9)

    @on_timelines("matmul_reduce_scatter", "matmul_all_reduce")
    def test_nothing_is_sent_before_it_is_there(self, t):
        for rank, spans in enumerate(t.spans):
            made = {}
            for span in of_kind(spans, "compute", "reduce"):
                made[span.slice, span.sub] = span.end  # the last of each is right
            computed = {(s.slice, s.sub): s.end for s in of_kind(spans, "compute")}
            for send in of_kind(spans, "send"):
                source = made if send.slice == rank else computed
                self.assertGreaterEqual(send.start, source[send.slice, send.sub] - 1e-9)

    def test_a_wait_names_whom_for(self):
        t = _timeline.timeline("all_gather_matmul", 4, ratio=2)
        for rank, spans in enumerate(t.spans):
            waits = [(s.slice, s.peer) for s in of_kind(spans, "wait")]
            others = [(rank - step) % 4 for step in (1, 2, 3)]
            self.assertEqual(waits, [(other, other) for other in others])
        t = _timeline.timeline("matmul_reduce_scatter", 4, ratio=2)
        for rank, spans in enumerate(t.spans):
            # The last partial to come is that of the rank before, which sent it last.
            (wait,) = of_kind(spans, "wait")
            self.assertEqual((wait.slice, wait.peer), (rank, (rank - 1) % 4))

    @parameterized.parameters(
        (("psums", 4), {}, "op='psums'.*matmul_reduce_scatter.*all_gather"),
        (("psum", 0), {}, "ranks=0"),
        (("psum", 4, 0), {}, "sub_slices=0"),
        (("psum", 4), {"ratio": 0.5}, "psum: ratio=0.5.*Leave it out"),
        (("all_gather_matmul", 4), {"ratio": -1}, "ratio=-1"),
        (("all_gather_matmul", 4), {"ratio": float("nan")}, "ratio=nan"),
        (("all_gather_matmul", 4), {"add": float("inf")}, "add=inf"),
    )
    def test_refuses(self, args, kw, words):
        with self.assertRaisesRegex(ValueError, words):
            _timeline.timeline(*args, **kw)


class Words(parameterized.TestCase):
    ALGORITHMS = (
        *(("psum", name) for name in ("one_shot", "two_shot", "nvrar")),
        *((op, "direct") for op in ("psum_scatter", "all_gather", "all_to_all")),
        *((op, "in_place") for op in MATMULS),
        *((op, "sliced") for op in MATMULS[:2]),
        *((op, "by_psum") for op in MATMULS),
    )

    @parameterized.parameters(*ALGORITHMS)
    def test_one_line(self, op, algorithm):
        for ranks in (2, 8):
            text = schedule.describe(op, algorithm, ranks)
            self.assertNotRegex(text, r"[\n{}]|\b1 others|  ")
            self.assertTrue(text[0].islower() and text[-1] != ".", text)
            if algorithm != "nvrar":
                self.assertIn(str(ranks), text)
        if op in SCATTERS:
            self.assertIn("rank order", text)

    def test_reduce_scatter(self):
        self.assertEqual(
            schedule.describe("matmul_reduce_scatter", "sliced", 8),
            "own slice last: rank r computes those of its 7 others in turn, from a "
            "neighbour's on, then slice r; each partial product goes to its owner's "
            "slot while the next is computed; 8 slots summed in rank order",
        )

    @parameterized.parameters(
        (8, 4, "4 nodes, local rank r of 2", "(2 steps)"),
        (4, 2, "2 nodes, local rank r of 2", "(1 step)"),
        (6, 3, "3 nodes, local rank r of 2", "(1 step, and a fold)"),
    )
    def test_nodes(self, ranks, nodes, *words):
        text = schedule.describe("psum", "nvrar", ranks, nodes)
        for word in words:
            self.assertIn(word, text)

    def test_without_an_algorithm(self):
        self.assertEqual(schedule.describe("psum", None, 8), "")

    def test_unknown(self):
        with self.assertRaisesRegex(ValueError, "'ring'.*one_shot, two_shot, nvrar"):
            schedule.describe("psum", "ring", 8)

    def test_examples(self):
        for module in (schedule, _timeline):
            failed, run = doctest.testmod(module)
            self.assertEqual((failed, run > 0), (0, True), module)


if __name__ == "__main__":
    absltest.main()
