#include "ops/matmul_program.h"

namespace jax_overlap {
namespace {

// A sum is pushed while the next rows are multiplied: so many pieces, if they are not small.
constexpr int64_t kReduceRounds = 4;
constexpr int64_t kReduceRows = 256;
// Rows of a round are whole tiles of a product.
constexpr int64_t kRoundRows = 128;

}  // namespace

// ------------------------------------------------------------------------ parts
MatmulProgram::Part MatmulProgram::PartOfSum(int owner) const {
  if (JO_MUTANT("wrong_slice") && ranks_ > 1 && owner == 0) owner = 1;
  const int64_t batch = s_.batch, outer = s_.outer, rows = s_.rows, cols = Cols(0);
  Part part = {};
  switch (s_.cut) {
    case Cut::kBatch:
      part = {batch / ranks_,
              outer * rows,
              cols,
              owner * (batch / ranks_) * outer * rows,
              outer * rows,
              0,
              0,
              0,
              1,
              owner * (batch / ranks_),
              0,
              0};
      break;
    case Cut::kCols:
      part = {batch, outer * rows,           cols / ranks_, 0, outer * rows, 0, 0, 0, 1, 0,
              0,     owner * (cols / ranks_)};
      break;
    default:
      part = {batch * outer,
              rows / ranks_,
              cols,
              owner * (rows / ranks_),
              rows,
              0,
              0,
              0,
              outer,
              0,
              0,
              0};
  }
  part.d_block = part.rows * part.cols;
  part.d_ld = part.cols;
  return part;
}

MatmulProgram::Part MatmulProgram::PartOfReduced(int owner) const {
  const SumPart sum = ReducedPart(s_, owner);
  const int64_t cols = Cols(0), first_row = sum.row_map.first, first_col = sum.first_col;
  return {static_cast<int64_t>(s_.batch),
          static_cast<int64_t>(sum.grid.rows),
          static_cast<int64_t>(sum.grid.cols),
          first_row,
          AllRows(),
          first_row * cols + first_col,
          AllRows() * cols,
          cols,
          1,
          0,
          0,
          first_col};
}

MatmulProgram::Part MatmulProgram::PartOfGathered(int source) const {
  const int64_t batch = s_.batch, outer = s_.outer, rows = s_.rows, inner = Inner(0);
  switch (s_.cut) {
    case Cut::kBatch: {
      const int64_t size = outer * rows * inner;
      return {batch, outer * rows,   inner, 0, outer * rows, source * batch * size, size, inner,
              1,     source * batch, 0,     0};
    }
    case Cut::kInner:
      return {batch,
              outer * rows,
              inner,
              0,
              outer * rows,
              source * inner,
              outer * rows * ranks_ * inner,
              ranks_ * inner,
              1,
              0,
              source * inner,
              0};
    default:
      return {batch * outer,         rows,  inner, 0, rows, source * rows * inner,
              ranks_ * rows * inner, inner, outer, 0, 0,    0};
  }
}

std::vector<MatmulProgram::Round> MatmulProgram::Rounds(int64_t blocks, int64_t rows, int64_t cols,
                                                        int64_t least) const {
  std::vector<Round> rounds;
  int64_t fit = cols == 0 ? rows : slot_ / cols;  // rows of a round
  if (fit == 0) return rounds;
  if (least > 1) fit = std::min(fit, std::max<int64_t>(kReduceRows, CeilDiv(blocks * rows, least)));
  if (fit >= rows) {
    const int64_t n = std::min(blocks, fit / std::max<int64_t>(rows, 1));
    for (int64_t b = 0; b < blocks; b += n) rounds.push_back({b, std::min(n, blocks - b), 0, rows});
    return rounds;
  }
  // As few rounds as the slot allows, of about the same size.
  int64_t n = CeilDiv(rows, CeilDiv(rows, fit));
  if (const int64_t tiles = RoundUp(n, kRoundRows); tiles <= fit) n = tiles;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t r = 0; r < rows; r += n) rounds.push_back({b, 1, r, std::min(n, rows - r)});
  }
  return rounds;
}

// What a part has of a round that was made for the largest part.
MatmulProgram::Round MatmulProgram::Within(const Round& round, const Part& part) {
  const int64_t rows = std::min(round.rows, part.rows - round.r);
  return {round.b, round.blocks, round.r, part.cols == 0 ? 0 : std::max<int64_t>(rows, 0)};
}

// ------------------------------------------------------------------------ steps
MatmulStep& MatmulProgram::Add(StepKind kind, int half, int stream, int peer) {
  MatmulStep step = {};
  step.kind = kind;
  step.half = half;
  step.stream = stream;
  step.peer = peer;
  steps_.push_back(step);
  return steps_.back();
}

void MatmulProgram::Order(int stream, int of) { Add(StepKind::kOrder, 0, stream).of = of; }

Rows MatmulProgram::XRows(const Part& part, const Round& round, int i) const {
  const int64_t inner = Inner(i);
  const int64_t row = part.x_first + round.b * part.x_block + round.r;
  return {{Space::kX, i, rank_, row * inner}, part.x_block * inner, inner};
}

Rows MatmulProgram::SlotRows(const Round& round, int64_t cols, int index, int peer) const {
  return {{Space::kSlot, index, peer, 0}, round.rows * cols, cols};
}

Rows MatmulProgram::ResultRows(const Part& part, const Round& round, Space space, int index) const {
  return {{space, index, rank_, part.d_first + round.b * part.d_block + round.r * part.d_ld},
          part.d_block,
          part.d_ld};
}

void MatmulProgram::Multiply(const Part& part, const Round& round, size_t i, int64_t inner,
                             int64_t cols, const Rows& x, const Rows* c, bool accumulates,
                             const Rows& d) {
  if (round.rows == 0 || round.blocks == 0 || cols == 0) return;
  const bool transposed = s_.products[i].transposed;
  // The whole w is [batch, all_inner, all_cols], or its transpose.
  const int64_t all_inner = s_.cut == Cut::kInner ? inner * ranks_ : inner, all_cols = Cols(i);
  const int64_t corner =
      transposed ? part.w_col * all_inner + part.w_row : part.w_row * all_cols + part.w_col;
  const int64_t ld = transposed ? all_inner : all_cols;
  for (int64_t b = 0; b < round.blocks;) {
    const int64_t weight = (round.b + b) / part.alike;
    int64_t n = round.blocks - b;
    if (part.alike > 1) n = std::min(n, (weight + 1) * part.alike - (round.b + b));
    MatmulStep step = {};
    step.kind = StepKind::kProduct;
    step.half = half_;
    step.batch = n;
    step.m = round.rows;
    step.n = cols;
    step.k = inner;
    step.transposed = transposed;
    step.accumulates = accumulates;
    step.x = x;
    step.x.place.at += b * x.block;
    const int64_t size = all_inner * all_cols;
    step.w = {{Space::kW, static_cast<int>(i), rank_, (part.w_batch + weight) * size + corner},
              part.alike > 1 ? 0 : size,
              ld};
    step.d = d;
    step.d.place.at += b * d.block;
    step.c = c == nullptr ? step.d : *c;
    if (c != nullptr) step.c.place.at += b * c->block;
    if (!Merge(step)) steps_.push_back(step);
    b += n;
  }
}

// Takes a product as one more matrix of the last one, where all distances are alike: those
// for consecutive ranks, and those of consecutive slots.
bool MatmulProgram::Merge(const MatmulStep& step) {
  if (steps_.empty() || step.batch != 1) return false;
  MatmulStep& last = steps_.back();
  const auto same = [](const MatmulStep& a, const MatmulStep& b) {
    return a.kind == b.kind && a.m == b.m && a.n == b.n && a.k == b.k &&
           a.transposed == b.transposed && !a.accumulates && !b.accumulates && a.x.ld == b.x.ld &&
           a.w.ld == b.w.ld && a.d.ld == b.d.ld && a.w.place.index == b.w.place.index &&
           a.d.place.space == b.d.place.space && a.d.place.index == b.d.place.index &&
           a.x.place.space == b.x.place.space;
  };
  if (!same(last, step)) return false;
  const bool to_slots = step.d.place.space == Space::kSlot && step.x.place.space == Space::kX &&
                        step.x.place.index == last.x.place.index &&
                        step.d.place.peer == last.d.place.peer + last.batch &&
                        step.d.place.at == last.d.place.at;
  const bool from_slots = step.x.place.space == Space::kSlot && step.d.place.space == Space::kOut &&
                          step.x.place.index == last.x.place.index + last.batch &&
                          step.x.place.at == last.x.place.at;
  if (!to_slots && !from_slots) return false;
  const int64_t x = to_slots ? step.x.place.at - last.x.place.at : slot_ * last.batch;
  const int64_t w = step.w.place.at - last.w.place.at;
  const int64_t d = to_slots ? 0 : step.d.place.at - last.d.place.at;
  if (last.batch == 1) {
    if (x < 0 || w < 0 || d < 0) return false;
    last.x.block = x;
    last.w.block = w;
    last.d.block = d;
  } else if ((to_slots && !last.over_peers) || x != last.x.block * last.batch ||
             w != last.w.block * last.batch || d != last.d.block * last.batch) {
    return false;
  }
  last.c = last.d;
  last.over_peers = to_slots;
  ++last.batch;
  return true;
}

// --------------------------------------------------------------------- programs
// The products of all parts, and the sum of the own one.
void MatmulProgram::ScatterRound(const std::vector<Part>& parts, const Round& round, int half) {
  const size_t products = s_.products.size();
  half_ = half;
  Add(StepKind::kBegin, half);
  for (int k = 1; k < ranks_; ++k) {
    const int owner = Rotated(rank_, k, ranks_);
    if (JO_MUTANT("skip_peer") && owner == 0) continue;
    const Part& part = parts[owner];
    const Round some = Within(round, part);
    const Rows there = SlotRows(some, part.cols, rank_, owner);
    // What is added up in between stays here.
    const Rows here = SlotRows(some, part.cols, rank_, rank_);
    for (size_t i = 0; i < products; ++i) {
      const bool is_last = i + 1 == products;
      Multiply(part, some, i, Inner(i), part.cols, XRows(part, some, static_cast<int>(i)), &here,
               i > 0, is_last ? there : here);
    }
  }
  Add(Several() ? StepKind::kArrive : StepKind::kArriveAndWait, half);
  const Part& mine = parts[rank_];
  const Round own = Within(round, mine);
  const Rows out = ResultRows(mine, own, Space::kOut, 0);
  const Rows slot = SlotRows(own, mine.cols, Several() ? rank_ : 1 - rank_, rank_);
  for (size_t i = 0; i < products; ++i) {
    const bool adds_slot = !Several() && i == 0;
    Multiply(mine, own, i, Inner(i), mine.cols, XRows(mine, own, static_cast<int>(i)),
             adds_slot ? &slot : nullptr, i > 0 || adds_slot, Several() ? slot : out);
  }
  if (Several()) {
    Add(StepKind::kWait, half);
    MatmulStep& sum = Add(StepKind::kSum, half);
    sum.batch = own.blocks;
    sum.m = own.rows;
    sum.n = mine.cols;
    sum.x = slot;
    sum.d = out;
  }
  Add(StepKind::kEnd, half);
}

std::vector<MatmulStep> MatmulProgram::Scatter() {
  std::vector<Part> parts;
  for (int owner = 0; owner < ranks_; ++owner) parts.push_back(PartOfSum(owner));
  const Part& part = parts[0];
  const auto rounds = Rounds(part.blocks, part.rows, part.cols, 1);
  for (size_t c = 0; c < rounds.size(); ++c) {
    ScatterRound(parts, rounds[c], static_cast<int>(c % kHalves));
  }
  if (!steps_.empty()) steps_.front().first = steps_.back().last = true;
  return std::move(steps_);
}

std::vector<MatmulStep> MatmulProgram::Gather(bool gathered) {
  std::vector<Part> parts;
  for (int source = 0; source < ranks_; ++source) parts.push_back(PartOfGathered(source));
  const Part& mine = parts[rank_];
  const int64_t inner = Inner(0);
  const auto rounds = Rounds(mine.blocks, mine.rows, inner, 1);
  if (rounds.empty()) return {};
  const bool adds = s_.cut == Cut::kInner;
  const auto copy = [&](int half, int stream, const Round& round, const Rows& from,
                        const Rows& to) {
    MatmulStep& step = Add(StepKind::kCopy, half, stream);
    step.batch = round.blocks;
    step.m = round.rows;
    step.n = inner;
    step.x = from;
    step.d = to;
  };
  const auto push = [&](size_t c) {
    const int half = static_cast<int>(c % kHalves);
    const int stream = PushStream(half);
    Add(StepKind::kBegin, half).first = c == 0;
    Order(stream, 0);
    for (int k = 1; k < ranks_; ++k) {
      const int peer = Rotated(rank_, k, ranks_);
      if (JO_MUTANT("skip_peer") && peer == 0) continue;
      copy(half, stream, rounds[c], XRows(mine, rounds[c], 0),
           SlotRows(rounds[c], inner, rank_, peer));
      Add(StepKind::kTell, half, stream, peer);
    }
  };
  // All weights of rows that came from `source`, or are the own ones.
  const auto multiply = [&](int source, const Round& round, const Rows& x, bool accumulates,
                            size_t i) {
    Part part = parts[source];
    // Of a result what is of x, but for the width.
    const int64_t cols = Cols(i);
    part.d_first = adds ? 0 : part.d_first / inner * cols;
    part.d_block = part.d_block / (adds ? inner * ranks_ : inner) * cols;
    part.d_ld = cols;
    Multiply(part, round, i, inner, cols, x, nullptr, accumulates,
             ResultRows(part, round, Space::kOut, static_cast<int>(i)));
  };
  const Round whole{0, mine.blocks, 0, mine.rows};

  for (size_t c = 0; c < std::min<size_t>(kHalves, rounds.size()); ++c) push(c);
  if (gathered) {
    Order(kGatherStream, 0);
    copy(0, kGatherStream, whole, XRows(mine, whole, 0),
         ResultRows(mine, whole, Space::kGathered, 0));
  }
  for (size_t i = 0; i < s_.products.size(); ++i) {
    multiply(rank_, whole, XRows(mine, whole, 0), false, i);
  }
  for (size_t c = 0; c < rounds.size(); ++c) {
    const int half = half_ = static_cast<int>(c % kHalves);
    // One source, then one, two, four: a product of several is faster, and each time as many
    // have come meanwhile.
    for (int step = 1, n = 1; step < ranks_; step += n, n = step == 2 ? 1 : step - 1) {
      n = std::min(n, ranks_ - step);
      std::vector<int> sources;
      for (int j = 0; j < n; ++j) sources.push_back(OwnFirst(rank_, step + j, ranks_));
      for (const int source : sources) Add(StepKind::kWait, half, 0, source);
      std::sort(sources.begin(), sources.end());  // neighbours make one product
      if (gathered) {
        Order(kGatherStream, 0);
        for (const int source : sources) {
          copy(half, kGatherStream, rounds[c], SlotRows(rounds[c], inner, source, rank_),
               ResultRows(parts[source], rounds[c], Space::kGathered, 0));
        }
      }
      for (size_t i = 0; i < s_.products.size(); ++i) {
        for (const int source : sources) {
          multiply(source, rounds[c], SlotRows(rounds[c], inner, source, rank_), adds, i);
        }
      }
    }
    if (gathered) Order(0, kGatherStream);
    Order(0, PushStream(half));  // an end counts the round: all of it has to be through
    Add(StepKind::kEnd, half);
    if (c + kHalves < rounds.size()) push(c + kHalves);
  }
  steps_.back().last = true;
  return std::move(steps_);
}

std::vector<MatmulStep> MatmulProgram::Reduce() {
  std::vector<Part> parts;
  Part largest = {};
  for (int owner = 0; owner < ranks_; ++owner) {
    parts.push_back(PartOfReduced(owner));
    const Part& part = parts.back();
    if (part.rows * part.cols > largest.rows * largest.cols) largest = part;
  }
  const auto rounds = Rounds(largest.blocks, largest.rows, largest.cols, kReduceRounds);
  const auto copy = [&](const Part& part, const Round& round, const Rows& from, const Rows& to) {
    if (round.rows == 0) return;
    MatmulStep& step = Add(StepKind::kCopy, 1, PushStream(1));
    step.batch = round.blocks;
    step.m = round.rows;
    step.n = part.cols;
    step.x = from;
    step.d = to;
  };
  for (const Round& round : rounds) {
    ScatterRound(parts, round, 0);
    Order(PushStream(1), 0);
    Add(StepKind::kBegin, 1, PushStream(1));
    const Part& mine = parts[rank_];
    const Round own = Within(round, mine);
    for (int k = 1; k < ranks_; ++k) {
      const int peer = Rotated(rank_, k, ranks_);
      copy(mine, own, ResultRows(mine, own, Space::kOut, 0), SlotRows(own, mine.cols, rank_, peer));
      Add(StepKind::kArrive, 1, PushStream(1), peer);
    }
    for (int k = 1; k < ranks_; ++k) {
      const int source = OwnFirst(rank_, k, ranks_);
      const Round theirs = Within(round, parts[source]);
      Add(StepKind::kWait, 1, PushStream(1), source);
      copy(parts[source], theirs, SlotRows(theirs, parts[source].cols, source, rank_),
           ResultRows(parts[source], theirs, Space::kOut, 0));
    }
    Add(StepKind::kEnd, 1, PushStream(1));
  }
  if (steps_.empty()) return {};
  steps_.front().first = true;
  MatmulStep end = steps_.back();
  steps_.pop_back();
  end.stream = 0;
  end.last = true;
  Order(0, PushStream(1));
  steps_.push_back(end);
  return std::move(steps_);
}

}  // namespace jax_overlap
