#include "ops/matmul_launch.h"

#include <algorithm>

#include "core/gpu_device.h"
#include "core/hash.h"

namespace jax_overlap {
namespace {

// A sum is bound by memory, and nothing waits in it.
constexpr int kSumBlocks = 528;
// Mostly there is little to finish, and each block takes time to begin.
constexpr int kFinishBlocks = 264;

// The largest power of two, up to kAlign, of which `bytes` is a multiple.
int32_t AlignOf(int64_t bytes) {
  int32_t align = MatmulLaunches::kAlign;
  while (bytes % align != 0) align /= 2;
  return align;
}

}  // namespace

// ------------------------------------------------------------------------ what
std::vector<MatmulStep> MatmulSpec::Program(int rank, int64_t slot) const {
  MatmulProgram program(shape, rank, slot);
  switch (kind) {
    case MatmulKind::kScatter: return program.Scatter();
    case MatmulKind::kGather: return program.Gather(gathered);
    default: return program.Reduce();
  }
}

// What is sent is of the type of x where x is gathered, and else of that of the result.
int64_t MatmulSpec::SizeAt(const Place& place) const {
  switch (place.space) {
    case Space::kOut: return SizeOf(out);
    case Space::kW: return SizeOf(in_w);
    case Space::kSlot: return SizeOf(kind == MatmulKind::kGather ? in : out);
    default: return SizeOf(in);
  }
}

GemmKey MatmulSpec::KeyOf(const MatmulStep& step) const {
  const auto align = [&](const Rows& rows) {
    const int64_t size = SizeAt(rows.place);
    const int32_t first = AlignOf(rows.place.at * size);
    return step.batch == 1 ? first : std::min(first, AlignOf(rows.block * size));
  };
  const Rows& c = step.accumulates ? step.c : step.d;
  return {step.m,
          step.n,
          step.k,
          step.batch,
          step.x.ld,
          step.w.ld,
          c.ld,
          step.d.ld,
          step.x.block,
          step.w.block,
          c.block,
          step.d.block,
          in,
          in_w,
          out,
          step.transposed,
          step.accumulates,
          fast && (in == GemmType::kF32 || IsFloat8(in)),
          align(step.x),
          align(step.w),
          align(c),
          align(step.d)};
}

std::string MatmulSpec::Fuse(int ordinal, std::vector<MatmulStep>* steps) const {
  std::string error;
  FuseScatter(steps, [&](const MatmulStep& peer, const MatmulStep& own) {
    return error.empty() && GpuGemm::Get().ScattersInOne(ordinal, KeyOf(peer), KeyOf(own), &error);
  });
  return error;
}

uint64_t MatmulSpec::Hash() const {
  uint64_t hash = Mixed(static_cast<uint64_t>(kind), static_cast<uint64_t>(shape.cut));
  for (const uint64_t word :
       {static_cast<uint64_t>(shape.batch), static_cast<uint64_t>(shape.outer),
        static_cast<uint64_t>(shape.rows), static_cast<uint64_t>(in), static_cast<uint64_t>(in_w),
        static_cast<uint64_t>(out), static_cast<uint64_t>(xs)}) {
    hash = Mixed(hash, word);
  }
  for (const Product& p : shape.products) hash = Mixed(Mixed(hash, p.inner), p.cols);
  return hash;
}

// -------------------------------------------------------------------- launches
// The places of a call.
struct MatmulLaunches::Places {
  const Arrays& arrays;
  const ExchangeCall& call;

  char* At(const Place& place, int half, int64_t size) const {
    switch (place.space) {
      case Space::kX: return arrays.x[place.index] + place.at * size;
      case Space::kW: return arrays.w[place.index] + place.at * size;
      case Space::kOut: return arrays.out[place.index] + place.at * size;
      case Space::kGathered: return arrays.gathered + place.at * size;
      case Space::kSlot: break;
    }
    char* const slots = call.layout.half[half].slots;
    return call.channel.At(slots, place.peer) + place.index * call.layout.slot_bytes +
           place.at * size;
  }
};

std::unique_ptr<MatmulLaunches> MatmulLaunches::Make(const MatmulSpec& spec, const GpuLane& lane,
                                                     const GpuChannel& channel, size_t bytes,
                                                     uint64_t call, std::string* error) {
  std::unique_ptr<MatmulLaunches> made(new MatmulLaunches(spec, lane));
  made->call_.channel = channel;
  made->call_.layout = ExchangeLayout::Carve(channel.own, spec.shape.ranks, bytes);
  made->call_.call = call & kExchangeCallMask;
  *error = made->Prepare();
  return error->empty() ? std::move(made) : nullptr;
}

// Heaps at one distance take the matrices of one product; for others it is several.
void MatmulLaunches::TakeSteps() {
  const GpuChannel& channel = call_.channel;
  const int64_t size = spec_.SizeAt({Space::kSlot, 0, 0, 0});
  const int64_t slot = static_cast<int64_t>(call_.layout.slot_bytes) / size;
  for (const MatmulStep& step : spec_.Program(channel.shape.rank, slot)) {
    if (!step.over_peers) {
      steps_.push_back(step);
      continue;
    }
    const char* const* const heaps = channel.heaps + step.d.place.peer;
    const int64_t distance = heaps[1] - heaps[0];
    bool alike = distance > 0 && distance % (size * static_cast<int64_t>(kAlign)) == 0;
    for (int64_t i = 1; i < step.batch; ++i) {
      alike = alike && heaps[i] - heaps[i - 1] == distance;
    }
    for (int64_t i = 0; i < (alike ? 1 : step.batch); ++i) {
      MatmulStep one = step;
      one.over_peers = false;
      if (alike) {
        one.d.block = distance / size;
      } else {
        one.batch = 1;
        one.x.place.at += i * step.x.block;
        one.w.place.at += i * step.w.block;
        one.d.place.peer += static_cast<int>(i);
      }
      steps_.push_back(one);
    }
  }
}

std::string MatmulLaunches::Prepare() {
  std::string error;
  call_.busy = lane_.busy;
  TakeSteps();
  error = spec_.Fuse(lane_.ordinal, &steps_);
  if (error.empty()) error = TakeMarks();
  if (!error.empty()) return error;
  if (steps_.empty()) {
    return "a row does not fit the slots of " + std::to_string(call_.layout.slot_bytes) +
           " bytes. Set JAX_OVERLAP_HEAP_BYTES to more, in all processes";
  }
  const CurrentDevice current(lane_.ordinal);
  cudaError_t status = cudaSuccess;
  plans_.resize(steps_.size());
  events_.resize(steps_.size());
  for (size_t i = 0; i < steps_.size() && status == cudaSuccess; ++i) {
    if (steps_[i].kind == StepKind::kProduct) {
      plans_[i] = GpuGemm::Get().PlanOf(lane_.ordinal, spec_.KeyOf(steps_[i]), &error);
      if (plans_[i] == nullptr) return error;
    }
    if (steps_[i].kind == StepKind::kOrder) {
      status = cudaEventCreateWithFlags(&events_[i], cudaEventDisableTiming);
    }
  }
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

// A round scatters and finishes before the next one does.
std::string MatmulLaunches::TakeMarks() {
  int64_t marks = 0;
  for (const MatmulStep& step : steps_) {
    if (step.kind == StepKind::kScatter) marks = std::max(marks, ScatterMarks(spec_.KeyOf(step)));
  }
  if (marks == 0) return "";
  std::string error;
  memory_ = SiteMemory::Take(lane_.ordinal, 2 * sizeof(Word) + marks, &error);
  if (memory_ == nullptr) return error;
  Carver carver(memory_->data());
  tiles_ = reinterpret_cast<uint32_t*>(carver.Take<Word>(1));
  blocks_ = reinterpret_cast<uint32_t*>(carver.Take<Word>(1));
  marks_ = carver.Take<uint8_t>(marks);
  return "";
}

MatmulLaunches::~MatmulLaunches() {
  const CurrentDevice current(lane_.ordinal);
  for (const cudaEvent_t event : events_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

std::string MatmulLaunches::Run(const Arrays& arrays,
                                const std::vector<ExchangeCall::Result>& results,
                                cudaStream_t stream) const {
  ExchangeCall call = call_;
  std::copy(results.begin(), results.end(), call.results);
  std::string error;
  for (size_t i = 0; i < steps_.size() && error.empty(); ++i) {
    error = RunStep(i, {arrays, call}, stream);
  }
  return error;
}

std::string MatmulLaunches::RunStep(size_t i, const Places& places, cudaStream_t stream) const {
  const MatmulStep& step = steps_[i];
  const auto stream_of = [&](int s) { return s == 0 ? stream : lane_.streams[s - 1]; };
  const cudaStream_t on = stream_of(step.stream);
  cudaError_t status = cudaSuccess;
  switch (step.kind) {
    case StepKind::kBegin: status = LaunchBegin(places.call, step.half, step.first, on); break;
    case StepKind::kArrive: status = LaunchArrive(places.call, step.half, step.peer, on); break;
    case StepKind::kTell: status = CopyArrival(places.call, step.half, step.peer, on); break;
    case StepKind::kArriveAndWait: status = LaunchArriveAndWait(places.call, step.half, on); break;
    case StepKind::kWait: status = LaunchWait(places.call, step.half, step.peer, on); break;
    case StepKind::kEnd: status = LaunchEnd(places.call, step.half, step.last, on); break;
    case StepKind::kCopy: status = Copy(step, places, on); break;
    case StepKind::kSum: status = Sum(step, places, on); break;
    case StepKind::kScatter: return Scatter(i, places, on);
    case StepKind::kFinish: status = Finish(step, places, on); break;
    case StepKind::kOrder:
      status = cudaEventRecord(events_[i], stream_of(step.of));
      if (status == cudaSuccess) status = cudaStreamWaitEvent(on, events_[i], 0);
      break;
    case StepKind::kProduct: {
      const auto at = [&](const Rows& rows) {
        return places.At(rows.place, step.half, spec_.SizeAt(rows.place));
      };
      return GpuGemm::Get().Launch(lane_, *plans_[i], at(step.x), at(step.w),
                                   at(step.accumulates ? step.c : step.d), at(step.d), on);
    }
  }
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

// The step after next is that of the own product.
std::string MatmulLaunches::Scatter(size_t i, const Places& places, cudaStream_t stream) const {
  const MatmulStep &peer = steps_[i], &own = steps_[i + 2];
  const auto at = [&](const Place& place) {
    return places.At(place, own.half, spec_.SizeAt(place));
  };
  Place slot = own.c.place;
  slot.index = slot.peer;
  const GpuChannel& channel = places.call.channel;
  const ExchangeHalf& half = places.call.layout.half[own.half];
  const GemmKey peer_key = spec_.KeyOf(peer), own_key = spec_.KeyOf(own);
  HopperScatterCall call = {peer_key,
                            own_key,
                            at(peer.x.place),
                            at(peer.w.place),
                            at(peer.d.place),
                            at(own.x.place),
                            at(own.w.place),
                            at(own.c.place),
                            at(own.d.place),
                            at(slot),
                            {},
                            0};
  call.flags.telling = &half.telling->value;
  call.flags.arrived = &half.arrived[peer.peer].value;
  call.flags.arrived_there = channel.At(&half.arrived[channel.shape.rank].value, peer.peer);
  call.flags.done = tiles_;
  call.flags.marks = marks_;
  return GpuGemm::Get().LaunchScatter(lane_, call, stream);
}

// As few copies as there can be: of all, of blocks, or of rows.
cudaError_t MatmulLaunches::Copy(const MatmulStep& step, const Places& places,
                                 cudaStream_t stream) const {
  const size_t size = spec_.SizeAt(step.x.place);
  char* from = places.At(step.x.place, step.half, size);
  char* to = places.At(step.d.place, step.half, size);
  int64_t blocks = step.batch, rows = step.m, cols = step.n;
  int64_t from_block = step.x.block, to_block = step.d.block;
  int64_t from_ld = step.x.ld, to_ld = step.d.ld;
  if (from_ld == cols && to_ld == cols) {  // blocks are rows
    cols *= rows;
    rows = blocks;
    blocks = 1;
    from_ld = from_block;
    to_ld = to_block;
    if (rows == 1 || (from_ld == cols && to_ld == cols)) {
      return cudaMemcpyAsync(to, from, rows * cols * size, cudaMemcpyDefault, stream);
    }
  }
  cudaError_t status = cudaSuccess;
  for (int64_t b = 0; b < blocks && status == cudaSuccess; ++b) {
    status = cudaMemcpy2DAsync(to + b * to_block * size, to_ld * size, from + b * from_block * size,
                               from_ld * size, cols * size, rows, cudaMemcpyDefault, stream);
  }
  return status;
}

// Of the slots, in which `from` lies, to d.
SumShape MatmulLaunches::SumOf(const MatmulStep& step, const Rows& from,
                               const Places& places) const {
  Place first = from.place;
  first.index = 0;
  const int64_t size = SizeOf(spec_.out);
  return {step.batch,
          step.m,
          step.n,
          places.At(first, step.half, size),
          call_.layout.slot_bytes,
          spec_.shape.ranks,
          from.block,
          from.ld,
          places.At(step.d.place, step.half, size),
          step.d.block,
          step.d.ld};
}

cudaError_t MatmulLaunches::Finish(const MatmulStep& step, const Places& places,
                                   cudaStream_t stream) const {
  return LaunchFinish<BFloat16>(places.call, step.half, step.last,
                                {SumOf(step, step.c, places), marks_, kScatterTile, blocks_},
                                kFinishBlocks, stream);
}

cudaError_t MatmulLaunches::Sum(const MatmulStep& step, const Places& places,
                                cudaStream_t stream) const {
  const SumShape shape = SumOf(step, step.x, places);
  switch (spec_.out) {
    case GemmType::kF64: return LaunchSum<double>(shape, kSumBlocks, stream);
    case GemmType::kBF16: return LaunchSum<BFloat16>(shape, kSumBlocks, stream);
    case GemmType::kF16: return LaunchSum<Float16>(shape, kSumBlocks, stream);
    default: return LaunchSum<float>(shape, kSumBlocks, stream);
  }
}

}  // namespace jax_overlap
