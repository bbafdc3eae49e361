// The programs of the fused matmuls for GPUs, run on the host: each rank has its streams, and
// which of them goes on is drawn by lot. A step that waits is not drawn before it may go on.
#include "ops/matmul_program.h"

#include <cstdio>
#include <deque>
#include <random>
#include <vector>

#include "ops/all_gather_matmul.h"
#include "ops/matmul_reduce_scatter.h"
#include "ops/matmul_test.h"

namespace jax_overlap {
namespace {

std::vector<MatmulStep> ProgramOf(const MatmulReduceScatter&, const MatmulCase& c, int rank,
                                  int64_t slot) {
  return MatmulProgram(c.shape, rank, slot).Scatter();
}
std::vector<MatmulStep> ProgramOf(const AllGatherMatmul&, const MatmulCase& c, int rank,
                                  int64_t slot) {
  return MatmulProgram(c.shape, rank, slot).Gather(c.gathered);
}
std::vector<MatmulStep> ProgramOf(const MatmulAllReduce&, const MatmulCase& c, int rank,
                                  int64_t slot) {
  return MatmulProgram(c.shape, rank, slot).Reduce();
}

template <class Op>
class ProgramTest {
 public:
  // Calls in a row, of which no rank waits for the others but by its steps. `fuses`: as where
  // one kernel scatters.
  ProgramTest(const std::vector<MatmulCase>& cases, int64_t slot, unsigned seed, bool fuses)
      : cases_(cases), ranks_(cases[0].shape.ranks), slot_(slot), random_(seed) {
    for (int r = 0; r < ranks_; ++r) {
      Rank rank;
      rank.heap.assign(kHalves * ranks_ * slot, -1e9f);
      for (Half& half : rank.halves) {
        half.arrived.assign(ranks_, 0);
        half.ready.assign(ranks_, 0);
      }
      rank.done.assign(kMatmulStreams, 0);
      rank.given.assign(kMatmulStreams, 0);
      for (size_t c = 0; c < cases.size(); ++c) {
        const MatmulSizes<Op> sizes(cases[c]);
        const MatmulInputs<Op> in{sizes, static_cast<int>(c)};
        std::vector<float> input(sizes.inputs.back());
        for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<float>(in.At(r, i));
        rank.inputs.push_back(input);
        rank.outputs.push_back(std::vector<float>(sizes.outputs.back(), 1e9f));
        std::vector<MatmulStep> steps = ProgramOf(Op{}, cases[c], r, slot);
        if (fuses) FuseScatter(&steps, Fits);
        for (size_t i = 0; i < steps.size(); ++i) {
          if (steps[i].kind == StepKind::kScatter) {
            GiveScatter(&rank, steps[i], steps[i + 2], c);
            ++fused_;
          } else {
            Give(&rank, steps[i], c);
          }
        }
      }
      team_.push_back(std::move(rank));
    }
  }

  void Run() {
    for (;;) {
      std::vector<std::pair<int, int>> able;
      bool left = false;
      for (int r = 0; r < ranks_; ++r) {
        for (int s = 0; s < kMatmulStreams; ++s) {
          if (team_[r].queue[s].empty()) continue;
          left = true;
          if (MayGoOn(r, team_[r].queue[s].front())) able.push_back({r, s});
        }
      }
      if (!left) break;
      JO_CHECK_IN(!able.empty(), "%d ranks: all wait", ranks_);
      const auto [r, s] = able[random_() % able.size()];
      Do(r, team_[r].queue[s].front());
      team_[r].queue[s].pop_front();
      ++team_[r].done[s];
    }
    Check();
  }
  int fused() const { return fused_; }

 private:
  struct Given {
    MatmulStep step;
    size_t call;
    size_t after;  // of kOrder: how many steps of the other stream
  };
  static bool Fits(const MatmulStep& peer, const MatmulStep& own) {
    return peer.m == own.m && peer.n == own.n && peer.k == own.k && peer.batch == own.batch;
  }
  struct Half {
    int64_t epoch = 0, telling = 0;
    std::vector<int64_t> arrived, ready;
  };
  struct Rank {
    std::vector<float> heap;  // [half][slot for rank][slot]
    Half halves[kHalves];
    std::vector<std::vector<float>> inputs, outputs;  // of each call
    std::deque<Given> queue[kMatmulStreams];
    std::vector<size_t> given, done;
    std::vector<bool> marks;  // of the elements of a kScatter
  };

  // Its parts, between which others go on: all is there, and told, before the own tiles.
  static void GiveScatter(Rank* rank, MatmulStep peer, MatmulStep own, size_t call) {
    peer.kind = StepKind::kProduct;
    Give(rank, peer, call);
    peer.kind = StepKind::kArrive;
    Give(rank, peer, call);
    own.kind = StepKind::kScatter;
    Give(rank, own, call);
  }

  static void Give(Rank* rank, MatmulStep step, size_t call) {
    if (step.kind == StepKind::kArriveAndWait) {
      step.kind = StepKind::kArrive;
      Give(rank, step, call);
      step.kind = StepKind::kWait;
    }
    JO_CHECK(step.stream >= 0 && step.stream < kMatmulStreams);
    const bool order = step.kind == StepKind::kOrder;
    rank->queue[step.stream].push_back({step, call, order ? rank->given[step.of] : 0});
    ++rank->given[step.stream];
  }

  bool MayGoOn(int r, const Given& given) const {
    const MatmulStep& step = given.step;
    const Rank& rank = team_[r];
    const Half& half = rank.halves[step.half];
    for (int p = 0; p < ranks_; ++p) {
      if (p == r || (step.peer >= 0 && step.peer != p)) continue;
      if (step.kind == StepKind::kBegin && half.ready[p] < half.epoch) return false;
      if (step.kind == StepKind::kWait && half.arrived[p] < half.epoch + 1) return false;
    }
    return step.kind != StepKind::kOrder || rank.done[step.of] >= given.after;
  }

  // Element 0 of a place, of this call of this rank.
  float* At(int r, const Given& given, const Place& place, int64_t further_peer = 0) {
    const MatmulSizes<Op> sizes(cases_[given.call]);
    Rank& rank = team_[r];
    const size_t products = cases_[given.call].shape.products.size();
    switch (place.space) {
      case Space::kX: return &rank.inputs[given.call][0] + sizes.inputs[place.index] + place.at;
      case Space::kW:
        return &rank.inputs[given.call][0] + sizes.inputs[sizes.xs + place.index] + place.at;
      case Space::kOut: return &rank.outputs[given.call][0] + sizes.outputs[place.index] + place.at;
      case Space::kGathered:
        return &rank.outputs[given.call][0] + sizes.outputs[products] + place.at;
      case Space::kSlot: break;
    }
    const int64_t peer = place.peer + further_peer;
    JO_CHECK(peer < ranks_ && (place.index == r || peer == r));
    return &team_[peer].heap[0] + (given.step.half * ranks_ + place.index) * slot_ + place.at;
  }

  void Do(int r, const Given& given) {
    const MatmulStep& s = given.step;
    Half& half = team_[r].halves[s.half];
    switch (s.kind) {
      case StepKind::kBegin: half.telling = half.epoch + 1; return;
      case StepKind::kTell: team_[s.peer].halves[s.half].arrived[r] = half.telling; return;
      case StepKind::kArrive:
        for (int p = 0; p < ranks_; ++p) {
          if (s.peer < 0 || s.peer == p) team_[p].halves[s.half].arrived[r] = half.epoch + 1;
        }
        return;
      case StepKind::kEnd: End(r, s); return;
      case StepKind::kScatter: team_[r].marks.assign(s.batch * s.m * s.n, false); [[fallthrough]];
      case StepKind::kProduct:
        for (int64_t b = 0; b < s.batch; ++b) Multiply(r, given, b);
        return;
      case StepKind::kFinish:
        for (size_t i = 0; i < team_[r].marks.size(); ++i) {
          const int64_t n = s.n, m = s.m, at = static_cast<int64_t>(i);
          if (team_[r].marks[i]) AddSlots(r, given, s.c, at / n / m, at / n % m, at % n);
        }
        End(r, s);
        return;
      case StepKind::kCopy:
      case StepKind::kSum:
        for (int64_t b = 0; b < s.batch; ++b) {
          for (int64_t i = 0; i < s.m * s.n; ++i) CopyOrSum(r, given, b, i / s.n, i % s.n);
        }
        return;
      default: return;
    }
  }

  void End(int r, const MatmulStep& s) {
    Half& half = team_[r].halves[s.half];
    ++half.epoch;
    for (int p = 0; p < ranks_; ++p) team_[p].halves[s.half].ready[r] = half.epoch;
    // Whoever reads a slot later reads what nobody sent.
    std::fill_n(team_[r].heap.begin() + s.half * ranks_ * slot_, ranks_ * slot_, -1e9f);
  }

  void Multiply(int r, const Given& given, int64_t b) {
    const MatmulStep& s = given.step;
    const float* const x = At(r, given, s.x.place) + b * s.x.block;
    const float* const w = At(r, given, s.w.place) + b * s.w.block;
    const float* const c = s.accumulates ? At(r, given, s.c.place) + b * s.c.block : nullptr;
    float* const d =
        At(r, given, s.d.place, s.over_peers ? b : 0) + (s.over_peers ? 0 : b * s.d.block);
    std::vector<float> result(s.m * s.n);
    // Of kScatter: what has come is added, if it is seen in time.
    const bool scatters = s.kind == StepKind::kScatter;
    const Half& half = team_[r].halves[s.half];
    const bool came = scatters && half.arrived[1 - r] == half.epoch + 1;
    Place slot = s.c.place;
    slot.index = slot.peer;
    for (int64_t i = 0; i < s.m; ++i) {
      for (int64_t j = 0; j < s.n; ++j) {
        const bool adds = !scatters || (came && random_() % 4 != 0);
        float sum = c == nullptr || !adds ? 0 : c[i * s.c.ld + j];
        for (int64_t k = 0; k < s.k; ++k) {
          sum += x[i * s.x.ld + k] * w[s.transposed ? j * s.w.ld + k : k * s.w.ld + j];
        }
        result[i * s.n + j] = adds ? sum : 1e9f;
        if (adds) continue;
        At(r, given, slot)[b * s.c.block + i * s.c.ld + j] = sum;
        team_[r].marks[(b * s.m + i) * s.n + j] = true;
      }
    }
    for (int64_t i = 0; i < s.m * s.n; ++i) d[i / s.n * s.d.ld + i % s.n] = result[i];
  }

  void CopyOrSum(int r, const Given& given, int64_t b, int64_t i, int64_t j) {
    const MatmulStep& s = given.step;
    if (s.kind == StepKind::kSum) {
      AddSlots(r, given, s.x, b, i, j);
    } else {
      At(r, given, s.d.place)[b * s.d.block + i * s.d.ld + j] =
          At(r, given, s.x.place)[b * s.x.block + i * s.x.ld + j];
    }
  }

  void AddSlots(int r, const Given& given, const Rows& from, int64_t b, int64_t i, int64_t j) {
    const Rows& to = given.step.d;
    Place slot = from.place;
    float sum = 0;
    for (slot.index = 0; slot.index < ranks_; ++slot.index) {
      sum += At(r, given, slot)[b * from.block + i * from.ld + j];
    }
    At(r, given, to.place)[b * to.block + i * to.ld + j] = sum;
  }

  void Check() {
    for (int r = 0; r < ranks_; ++r) {
      for (size_t c = 0; c < cases_.size(); ++c) {
        const MatmulSizes<Op> sizes(cases_[c]);
        const std::vector<float>& out = team_[r].outputs[c];
        size_t a = 0;
        for (size_t i = 0; i < out.size(); ++i) {
          while (i >= sizes.outputs[a + 1]) ++a;
          const MatmulInputs<Op> in{sizes, static_cast<int>(c)};
          const int right = MatmulExpected(in, r, a, i - sizes.outputs[a]);
          JO_CHECK_IN(out[i] == right,
                      "%d ranks, rank %d, call %zu, result %zu, element %zu: %g for %d", ranks_, r,
                      c, a, i - sizes.outputs[a], out[i], right);
        }
      }
    }
  }

  const std::vector<MatmulCase> cases_;
  const int ranks_;
  const int64_t slot_;
  std::mt19937 random_;
  std::vector<Rank> team_;
  int fused_ = 0;
};

// Shapes in which something is to be computed: others never come to a GPU.
template <class Op>
std::vector<MatmulCase> Cases(int ranks) {
  std::vector<MatmulCase> cases;
  for (const MatmulCase& c : MatmulShapes<Op>(ranks)) {
    if (c.shape.rows > 0 && c.shape.products[0].inner > 0 && c.shape.products[0].cols > 0) {
      cases.push_back(c);
    }
  }
  return cases;
}

template <class Op>
int RunAll() {
  int passed = 0;
  for (const int ranks : {2, 3, 4, 5, 8}) {
    for (const int64_t slot : {1 << 20, 1000, 600}) {
      ProgramTest<Op>(Cases<Op>(ranks), slot, ranks + slot, false).Run();
      ++passed;
    }
  }
  for (unsigned seed = 0; seed < 8; ++seed) {
    for (const int64_t slot : {1 << 20, 600}) {
      ProgramTest<Op> test(Cases<Op>(2), slot, seed, true);
      test.Run();
      JO_CHECK((test.fused() > 0) != Op::kGathers);
      ++passed;
    }
  }
  // The same call again and again: slots are reused.
  ProgramTest<Op>(std::vector<MatmulCase>(50, Cases<Op>(3)[1]), 64, 1, false).Run();
  ProgramTest<Op>(std::vector<MatmulCase>(50, Cases<Op>(2)[1]), 64, 1, true).Run();
  return passed + 2;
}

// A slot that takes no row.
void TooLarge() {
  const MatmulCase c = Cases<MatmulReduceScatter>(2)[0];
  JO_CHECK(MatmulProgram(c.shape, 0, 3).Scatter().empty());
  JO_CHECK(MatmulProgram(c.shape, 0, 3).Gather(false).empty());
  JO_CHECK(MatmulProgram(c.shape, 0, 3).Reduce().empty());
}

// Neighbours are one product, at most two for all of the others.
void FewProducts() {
  for (int rank = 0; rank < 8; ++rank) {
    const MatmulShape shape{Cut::kRows, 8, 1, 1, 64, {{16, 32, false}}};
    const auto count = [](const std::vector<MatmulStep>& steps) {
      return std::count_if(steps.begin(), steps.end(),
                           [](const MatmulStep& step) { return step.kind == StepKind::kProduct; });
    };
    const int runs = rank == 0 || rank == 7 ? 1 : 2;
    JO_CHECK(count(MatmulProgram(shape, rank, 1 << 20).Scatter()) == 1 + runs);
    JO_CHECK(count(MatmulProgram(shape, rank, 1 << 20).Gather(true)) <= 6);
  }
}

// What is measured before slots are there is what is computed in them, also of float8, where all
// has to begin at 16 bytes.
void Aligned() {
  const auto check = [](const std::vector<MatmulStep>& steps) {
    JO_CHECK(!steps.empty());
    for (const MatmulStep& step : steps) {
      if (step.kind != StepKind::kProduct) continue;
      for (const Rows& rows : {step.x, step.w, step.d}) {
        JO_CHECK(rows.place.at % 16 == 0 && rows.ld % 16 == 0);
        JO_CHECK(step.batch == 1 || rows.block % 16 == 0);
      }
    }
  };
  for (const size_t ranks : {2, 3, 4, 5, 8}) {
    for (const Cut cut : {Cut::kRows, Cut::kBatch, Cut::kCols, Cut::kInner}) {
      for (const size_t batch : {size_t{1}, ranks}) {
        const MatmulShape shape{cut,       static_cast<int>(ranks),         batch, 1,
                                5 * ranks, {{16 * ranks, 32 * ranks, true}}};
        for (size_t rank = 0; rank < ranks; ++rank) {
          MatmulProgram gather(shape, rank, kLargeSlot), scatter(shape, rank, kLargeSlot);
          if (cut != Cut::kCols) check(gather.Gather(true));
          if (cut != Cut::kInner && (cut != Cut::kBatch || batch > 1)) check(scatter.Scatter());
          if (cut == Cut::kRows) check(MatmulProgram(shape, rank, kLargeSlot).Reduce());
        }
      }
    }
  }
}

}  // namespace
}  // namespace jax_overlap

int main() {
  using namespace jax_overlap;  // NOLINT
  int passed = RunAll<MatmulReduceScatter>() + RunAll<AllGatherMatmul>();
  passed += RunAll<MatmulAllReduce>();
  TooLarge();
  FewProducts();
  Aligned();
  std::printf("matmul_program_test: %d passed, 0 failed\n", passed + 3);
}
