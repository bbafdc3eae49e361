// What a rank's GPU does in a fused matmul: products, transfers and waits, in an order.
//
// A program is made once for a call site and run in each call: all that it says (places,
// sizes, whose slot) follows from the shapes and the rank, so a graph can capture it. It is
// data, and matmul_program_test.cc runs it on the host; on a GPU each product is one of
// cuBLASLt's, and each other step a small kernel or a copy (ops/matmul_gpu.cc).
//
//   Scatter   The products of the others' parts go from their epilogues straight into the
//             slots that the owners have for them, the own part last (arXiv:2604.24013).
//             With two ranks the epilogue of that last product adds what has come:
//
//             begin | part of the peer -> there | arrive, wait | part r | end
//
//             or, in bfloat16 on Hopper, in one kernel that tells the peer itself and adds
//             what has come by then; what has not is added after it (FuseScatter):
//
//             begin | part of the peer -> there, part r | wait | finish | end
//
//             With more the slots are summed, in rank order:
//
//             begin | part r+1 -> its owner | r+2 .. | arrive | part r | wait | sum | end
//
//   Gather    The copy engine pushes x to the others, each at another one. The product of
//             the own x comes first, those of the others' as they come.
//
//             program:  begin | x_r w | wait x_(r-1) | x_(r-1) w | wait x_(r-2) .. | end
//             beside:           x_r -> r+1 | tell | x_r -> r+2 | tell ..
//
//             No kernel of ours is beside the products: they may leave it no multiprocessor
//             until they end, and what comes after it would come as late.
//
//   Reduce    A scatter, whose sums are pushed to the others while the next rows are
//             multiplied.
//
// Work that does not fit the slots goes in rounds. There are two sets of slots with flags of
// their own (core/exchange.h says who waits for whom).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/matmul.h"
#include "ops/matmul_all_reduce.h"

namespace jax_overlap {

enum class Space { kX, kW, kOut, kGathered, kSlot };

// Element `at` of x, w or result `index`, or of the slot for rank `index` in the heap of
// rank `peer`.
struct Place {
  Space space;
  int index;
  int peer;
  int64_t at;
};

// Rows of an array, `ld` elements apart, in blocks that are `block` elements apart.
struct Rows {
  Place place;
  int64_t block, ld;
};

enum class StepKind {
  kBegin,          // until the slots of the others may be written
  kProduct,        // d = x w, or c + x w
  kCopy,           // d = x
  kArrive,         // tells `peer` (-1: all) that its slot is filled
  kTell,           // the same, by the copy engine
  kWait,           // until `peer` (-1: all) has filled the slot here
  kArriveAndWait,  // both, of all
  kSum,            // d = the sum of the slots here, in rank order
  kEnd,            // the slots here may be written again
  kScatter,        // a product for the peer and, in the same kernel, the own one (FuseScatter)
  kFinish,         // what of the own one kScatter could not add, and kEnd
  kOrder,          // `stream` goes on when what `of` was given is done
};

// Of a product: `batch` times [m, k] [k, n]; w may come as [n, k]. Of a copy and a sum:
// `batch` times [m, n].
struct MatmulStep {
  StepKind kind;
  int stream = 0;  // 0 is the program's
  int half = 0;    // which set of slots
  int peer = -1;
  int of = 0;
  bool first = false, last = false;  // of a call: one of its begins, one of its ends

  int64_t batch = 1, m = 0, n = 0, k = 0;
  bool transposed = false, accumulates = false;
  bool over_peers = false;  // matrix i goes to rank d.place.peer + i, and d.block is nothing
  Rows x = {}, w = {}, c = {}, d = {};
};

// The program's stream, one for what is pushed to each set of slots, and one for what is
// gathered beside the products.
constexpr int kMatmulStreams = 4;
constexpr int kHalves = 2;
// Elements of a slot that takes anything, in one round. As all slots it begins at, and is a
// multiple of, whole lines.
constexpr int64_t kLargeSlot = int64_t{1} << 56;
constexpr int PushStream(int half) { return 1 + half; }
constexpr int kGatherStream = 3;

// Makes the steps of a rank.
class MatmulProgram {
 public:
  // `slot`: elements of a slot, of what is sent.
  MatmulProgram(const MatmulShape& s, int rank, int64_t slot)
      : s_(s), rank_(rank), ranks_(s.ranks), slot_(slot) {}

  // Empty if not even a row fits a slot.
  std::vector<MatmulStep> Scatter();
  std::vector<MatmulStep> Gather(bool gathered);
  std::vector<MatmulStep> Reduce();

 private:
  // Of the result, for Scatter and Reduce, or of the gathered x.
  struct Part {
    int64_t blocks, rows, cols;
    int64_t x_first, x_block;        // rows of x
    int64_t d_first, d_block, d_ld;  // elements of the result, or the gathered x
    int64_t alike;                   // blocks with one weight
    int64_t w_batch, w_row, w_col;   // where it begins
  };
  // Blocks [b, b + blocks) of a part, and in these rows [r, r + rows).
  struct Round {
    int64_t b, blocks, r, rows;
  };

  Part PartOfSum(int owner) const;
  Part PartOfReduced(int owner) const;
  Part PartOfGathered(int source) const;
  std::vector<Round> Rounds(int64_t blocks, int64_t rows, int64_t cols, int64_t least) const;
  static Round Within(const Round& round, const Part& part);

  MatmulStep& Add(StepKind kind, int half, int stream = 0, int peer = -1);
  void Order(int stream, int of);
  // Places in a round.
  Rows XRows(const Part& part, const Round& round, int i) const;
  Rows SlotRows(const Round& round, int64_t cols, int index, int peer) const;
  Rows ResultRows(const Part& part, const Round& round, Space space, int index) const;
  // d (+)= x w_i, for the weight of a part; `c` null: d itself is added to, if at all.
  void Multiply(const Part& part, const Round& round, size_t i, int64_t inner, int64_t cols,
                const Rows& x, const Rows* c, bool accumulates, const Rows& d);
  bool Merge(const MatmulStep& step);
  void ScatterRound(const std::vector<Part>& parts, const Round& round, int half);

  bool Several() const { return ranks_ > 2; }
  int64_t Inner(size_t i) const { return static_cast<int64_t>(s_.products[i].inner); }
  int64_t Cols(size_t i) const { return static_cast<int64_t>(s_.products[i].cols); }
  int64_t AllRows() const { return static_cast<int64_t>(s_.outer * s_.rows); }

  const MatmulShape& s_;
  const int rank_, ranks_;
  const int64_t slot_;
  int half_ = 0;  // of the products that are added
  std::vector<MatmulStep> steps_;
};

// Where a product for the only peer, its arrival, the own product and the end follow one
// another and `fits` takes both products, makes them
//
//   kScatter    d = x w there, and tells the peer; then, with the operands of the own product's
//               step, tile by tile: d = c + x w where c has come, x w to the slot for the own
//               rank where it has not
//   kWait       for the peer
//   kFinish     d = the sum of the slots for these tiles; the end
//
// so that nothing is idle between the two, and what is stored there takes no time of its own.
template <class Fits>
void FuseScatter(std::vector<MatmulStep>* steps, const Fits& fits) {
  for (size_t i = 0; i + 3 < steps->size(); ++i) {
    MatmulStep &peer = (*steps)[i], &arrival = (*steps)[i + 1], &own = (*steps)[i + 2];
    const bool products = peer.kind == StepKind::kProduct && own.kind == StepKind::kProduct &&
                          arrival.kind == StepKind::kArriveAndWait &&
                          (*steps)[i + 3].kind == StepKind::kEnd;
    if (!products || peer.d.place.space != Space::kSlot || peer.over_peers || peer.accumulates ||
        !own.accumulates || own.c.place.space != Space::kSlot || !fits(peer, own)) {
      continue;
    }
    peer.kind = StepKind::kScatter;
    peer.peer = peer.d.place.peer;
    arrival.kind = StepKind::kWait;
    own.kind = StepKind::kFinish;
    own.last = (*steps)[i + 3].last;
    steps->erase(steps->begin() + i + 3);
  }
}

}  // namespace jax_overlap
