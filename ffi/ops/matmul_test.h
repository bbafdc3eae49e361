// The tests of the fused matmuls: an op says what it computes, by the formula of
// matmul.h, and this runs it in place and sliced, over many shapes and calls in a row.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "ops/matmul.h"
#include "ops/team_test.h"

namespace jax_overlap {

// An op under test has
//   kScatters, kGathers           what it does beside the matmul
//   Tasks, RunTask, Sliced, RunSliced   as its handler has
//
// A rank's xs and ws lie one after the other in its operand, its results in its result.
struct MatmulCase {
  MatmulShape shape;
  bool gathered = false;  // whether the gathered x is a result, too

  size_t xs(bool gathers) const { return gathers ? 1 : shape.products.size(); }
};

// The sizes of a call, seen from one rank.
template <class Op>
struct MatmulSizes {
  explicit MatmulSizes(const MatmulCase& c) : shape(c.shape), xs(c.xs(Op::kGathers)) {
    const size_t rows = shape.outer * shape.rows, ranks = shape.ranks;
    const auto times = [&](Cut cut) { return Op::kGathers && shape.cut == cut ? ranks : 1; };
    const size_t over = Op::kScatters ? ranks : 1;
    for (size_t i = 0; i < xs; ++i) Add(&inputs, shape.batch * rows * shape.products[i].inner);
    for (const Product& p : shape.products) {
      Add(&inputs, shape.batch * times(Cut::kBatch) * p.inner * times(Cut::kInner) * p.cols);
    }
    for (size_t i = 0; i < (Op::kGathers ? shape.products.size() : 1); ++i) {
      const size_t all = times(Cut::kBatch) * times(Cut::kRows);
      Add(&outputs, shape.batch * rows * all * shape.products[i].cols / over);
    }
    if (c.gathered) Add(&outputs, shape.batch * rows * shape.products[0].inner * ranks);
  }

  // First element of each array, and the end.
  static void Add(std::vector<size_t>* ends, size_t n) { ends->push_back(ends->back() + n); }
  MatmulShape shape;
  size_t xs;
  std::vector<size_t> inputs{0}, outputs{0};
};

// Element (g, row, k) of x_i and (g, k, n) of w_i of a rank, as integers.
template <class Op>
struct MatmulInputs {
  const MatmulSizes<Op>& sizes;
  int call;

  int X(int rank, size_t i, size_t g, size_t row, size_t k) const {
    const MatmulShape& s = sizes.shape;
    return At(rank, sizes.inputs[i] + (g * s.outer * s.rows + row) * s.products[i].inner + k);
  }
  int W(int rank, size_t i, size_t g, size_t k, size_t n, size_t inner) const {
    const Product& p = sizes.shape.products[i];
    const size_t at = p.transposed ? (g * p.cols + n) * inner + k : (g * inner + k) * p.cols + n;
    return At(rank, sizes.inputs[sizes.xs + i] + at);
  }
  int At(int rank, size_t at) const { return InputAt(rank, at, call); }
};

// Element (g, row, n) of the sum of all ranks' products.
template <class Op>
int SumAt(const MatmulInputs<Op>& in, size_t g, size_t row, size_t n) {
  const MatmulShape& s = in.sizes.shape;
  int sum = 0;
  for (int r = 0; r < s.ranks; ++r) {
    for (size_t i = 0; i < s.products.size(); ++i) {
      const size_t inner = s.products[i].inner;
      for (size_t k = 0; k < inner; ++k) sum += in.X(r, i, g, row, k) * in.W(r, i, g, k, n, inner);
    }
  }
  return sum;
}

// Element (g, row, k) of the gathered x.
template <class Op>
int GatheredAt(const MatmulInputs<Op>& in, size_t g, size_t row, size_t k) {
  const MatmulShape& s = in.sizes.shape;
  const size_t inner = s.products[0].inner, all = s.rows * s.ranks;
  switch (s.cut) {
    case Cut::kBatch: return in.X(static_cast<int>(g / s.batch), 0, g % s.batch, row, k);
    case Cut::kInner: return in.X(static_cast<int>(k / inner), 0, g, row, k % inner);
    default:
      return in.X(static_cast<int>(row % all / s.rows), 0, g, row / all * s.rows + row % s.rows, k);
  }
}

// Element `at` of result `a` of a rank.
template <class Op>
int MatmulExpected(const MatmulInputs<Op>& in, int rank, size_t a, size_t at) {
  const MatmulShape& s = in.sizes.shape;
  const size_t ranks = s.ranks, rows = s.outer * s.rows;
  if constexpr (Op::kGathers) {
    const size_t all_rows = rows * (s.cut == Cut::kRows ? ranks : 1);
    const size_t inner = s.products[0].inner * (s.cut == Cut::kInner ? ranks : 1);
    const size_t cols = a < s.products.size() ? s.products[a].cols : inner;
    const size_t n = at % cols, row = at / cols % all_rows, g = at / cols / all_rows;
    if (a == s.products.size()) return GatheredAt(in, g, row, n);
    int sum = 0;
    for (size_t k = 0; k < inner; ++k) {
      sum += GatheredAt(in, g, row, k) * in.W(rank, a, g, k, n, inner);
    }
    return sum;
  } else {
    const size_t over = Op::kScatters ? ranks : 1, part = Op::kScatters ? rank : 0;
    const size_t cols = s.products[0].cols / (s.cut == Cut::kCols ? over : 1);
    const size_t part_rows = s.cut == Cut::kRows ? s.rows / over : s.rows;
    size_t n = at % cols, row = at / cols % (s.outer * part_rows);
    size_t g = at / cols / (s.outer * part_rows);
    if (s.cut == Cut::kCols) n += part * cols;
    if (s.cut == Cut::kBatch) g += part * (s.batch / over);
    if (s.cut == Cut::kRows) row = row / part_rows * s.rows + part * part_rows + row % part_rows;
    return SumAt(in, g, row, n);
  }
}

template <class Op, class T>
class MatmulTest {
 public:
  MatmulTest(int ranks, std::vector<MatmulCase> cases)
      : ranks_(ranks),
        cases_(std::move(cases)),
        team_(ranks, HeapBytes(), std::to_string(ranks) + " ranks") {
    for (const MatmulCase& c : cases_) {
      const MatmulSizes<Op> sizes(c);
      team_.AddCall(sizes.inputs.back(), sizes.outputs.back());
    }
  }

  void InPlace(unsigned seed) {
    team_.template RunCalls<true>(false, seed, [&](auto& link, char*, int i, const T* in, T* out) {
      WithOperands(link, i, in, out, [&](const MatmulOperands& operands) {
        const MatmulCase& c = cases_[i];
        for (size_t t = link.rank(); t < Op::Tasks(c.shape, c.gathered); t += ranks_) {
          Op::template RunTask<T, T>(c.shape, operands, t, c.gathered);
        }
      });
    });
    Check();
  }

  void Sliced(unsigned seed, bool fibers) {
    team_.template RunCalls<false>(fibers, seed,
                                   [&](auto& link, char* heap, int i, const T* in, T* out) {
                                     RunSliced(link, heap, i, in, out);
                                   });
    Check();
  }

  void AbsentPeerIsNamed() {
    team_.CheckAbsentPeerIsNamed(
        [&](auto& link, char* heap, const T* in, T* out) { RunSliced(link, heap, 0, in, out); },
        Op::kGathers ? OwnFirst(0, 1, ranks_) : Rotated(0, 1, ranks_));
  }

 private:
  using SlicedOp = typename Op::template Sliced<T>;

  size_t HeapBytes() const {
    size_t bytes = 64;
    if constexpr (!std::is_void<SlicedOp>::value) {
      Carver carver(nullptr);
      SlicedOp::Carve(carver, ranks_, kBlockElements);
      bytes = carver.bytes();
    }
    return bytes;
  }

  template <class Link>
  void RunSliced(Link& link, char* heap, int i, const T* in, T* out) {
    WithOperands(link, i, in, out, [&](const MatmulOperands& operands) {
      Carver carver(heap);
      const auto sliced = SlicedOp::Carve(carver, ranks_, kBlockElements);
      const MatmulCase& c = cases_[i];
      Op::template RunSliced<T, T>(sliced, link, c.shape, operands, c.gathered);
    });
  }

  // The arrays of all ranks, which a link of fibres or threads can address.
  template <class Link, class F>
  void WithOperands(Link& link, int i, const T* in, T* out, F f) {
    const MatmulSizes<Op> sizes(cases_[i]);
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (size_t a = 0; a + 1 < sizes.inputs.size(); ++a) {
      for (int r = 0; r < ranks_; ++r) inputs.push_back(link.Input(in, r) + sizes.inputs[a]);
    }
    for (size_t a = 0; a + 1 < sizes.outputs.size(); ++a) {
      for (int r = 0; r < ranks_; ++r) outputs.push_back(link.Output(out, r) + sizes.outputs[a]);
    }
    f(MatmulOperands(inputs.data(), outputs.data(), ranks_, sizes.xs));
  }

  void Check() {
    team_.Check([&](int rank, size_t i, int call) {
      const MatmulSizes<Op> sizes(cases_[call]);
      size_t a = 0;
      while (i >= sizes.outputs[a + 1]) ++a;
      return MatmulExpected<Op>({sizes, call}, rank, a, i - sizes.outputs[a]);
    });
  }

  const int ranks_;
  const std::vector<MatmulCase> cases_;
  TestTeam<T> team_;
};

// Every cut; no rows, no columns, nothing to add; rows in one run and in many; fewer and
// more than a block; several products, of w and of its transpose.
template <class Op>
std::vector<MatmulCase> MatmulShapes(int ranks) {
  const size_t p = ranks;
  std::vector<MatmulCase> cases;
  for (const Cut cut : {Cut::kRows, Cut::kBatch, Op::kGathers ? Cut::kInner : Cut::kCols}) {
    const bool some = !Op::kScatters && !Op::kGathers;
    const size_t rows = Op::kScatters && cut == Cut::kRows ? p : 1;
    const size_t batch = Op::kScatters && cut == Cut::kBatch ? p : 1;
    const size_t cols = Op::kScatters && cut == Cut::kCols ? p : 1;
    for (const bool t : {false, true}) {
      const std::vector<Product> one = {{5, 6 * cols, t}};
      const std::vector<Product> two = {{3, 4 * cols, t},
                                        {Op::kGathers ? size_t{3} : 7, 4 * cols, !t}};
      cases.push_back({{cut, ranks, batch, 1, 2 * rows, one}});
      cases.push_back({{cut, ranks, 2 * batch, 3, 5 * rows, two}, Op::kGathers});
      cases.push_back({{cut, ranks, batch, 1, 130 * rows, {{2, 3 * cols, t}}}});
      cases.push_back({{cut, ranks, batch, 70, 2 * rows, {{2, 3 * cols, t}}}, Op::kGathers});
      cases.push_back({{cut, ranks, batch, 1, rows, {{2, 520 * cols, t}}}});
      cases.push_back({{cut, ranks, batch, 1, 0, one}});
      cases.push_back({{cut, ranks, batch, 2, 3 * rows, {{0, 4 * cols, t}}}, Op::kGathers});
      cases.push_back({{cut, ranks, batch, 2, 3 * rows, {{4, 0, t}}}, Op::kGathers});
    }
    if (some) break;  // nothing is cut in the operands
  }
  return cases;
}

template <class Op, class T>
int CheckMatmul(const std::vector<int>& sizes, bool fibers) {
  constexpr bool kHasSliced = !std::is_void<typename Op::template Sliced<T>>::value;
  for (const int ranks : sizes) {
    const auto cases = MatmulShapes<Op>(ranks);
    MatmulTest<Op, T>(ranks, cases).InPlace(ranks);
    if constexpr (kHasSliced) MatmulTest<Op, T>(ranks, cases).Sliced(7 * ranks, fibers);
  }
  return static_cast<int>(sizes.size()) * (kHasSliced ? 2 : 1);
}

template <class Op>
void RunMatmulTests(const char* name) {
  int passed = CheckMatmul<Op, float>({1, 2, 3, 4, 5, 8}, false);
  passed += CheckMatmul<Op, double>({2, 3}, false) + CheckMatmul<Op, BFloat16>({2, 3, 4}, false);
  passed += CheckMatmul<Op, Float16>({3}, false);
  if constexpr (!std::is_void<typename Op::template Sliced<float>>::value) {
#if !defined(__SANITIZE_THREAD__)  // it does not know about switched stacks
    passed += CheckMatmul<Op, float>({2, 3, 4, 6}, true);
#endif
    // Slots are reused, call after call, and without a barrier between the calls.
    const MatmulShape shape = MatmulShapes<Op>(3)[0].shape;
    MatmulTest<Op, float>(3, std::vector<MatmulCase>(100, {shape})).Sliced(5, false);
    MatmulTest<Op, float>(3, {{shape}}).AbsentPeerIsNamed();
    passed += 2;
  }
  std::printf("%s: %d passed, 0 failed\n", name, passed);
}

}  // namespace jax_overlap
