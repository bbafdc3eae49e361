#include "ops/matmul_gpu.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/element_type.h"
#include "core/gpu_memory.h"
#include "core/gpu_team.h"

namespace jax_overlap {

namespace ffi = xla::ffi;

namespace {

constexpr size_t kOperandAlign = 16;
// A sum is bound by memory, and nothing waits in it.
constexpr int kSumBlocks = 528;
constexpr uint64_t kCallMask = (1 << 24) - 1;

ffi::Error Internal(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInternal, text); }

// The largest power of two, up to kOperandAlign, of which `bytes` is a multiple.
int32_t AlignOf(int64_t bytes) {
  int32_t align = kOperandAlign;
  while (bytes % align != 0) align /= 2;
  return align;
}

GemmType TypeOf(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F64: return GemmType::kF64;
    case ffi::DataType::BF16: return GemmType::kBF16;
    case ffi::DataType::F16: return GemmType::kF16;
    default: return GemmType::kF32;
  }
}

}  // namespace

// Where the arrays of an execution are.
struct MatmulGpuSite::Arrays {
  std::vector<char*> x, w, out;
  char* gathered = nullptr;
  const ExchangeCall* call;

  char* At(const Place& place, int half, int64_t size) const {
    switch (place.space) {
      case Space::kX: return x[place.index] + place.at * size;
      case Space::kW: return w[place.index] + place.at * size;
      case Space::kOut: return out[place.index] + place.at * size;
      case Space::kGathered: return gathered + place.at * size;
      case Space::kSlot: break;
    }
    char* const slots = call->layout.half[half].slots;
    return call->channel.heaps[place.peer] + (slots - call->channel.own) +
           place.index * call->layout.slot_bytes + place.at * size;
  }
};

ffi::ErrorOr<std::unique_ptr<MatmulGpuSite>> MatmulGpuSite::Make(const Attributes& a) {
  auto site = std::make_unique<MatmulGpuSite>();
  std::string error = site->gpu_.Init(a.op, a.abi, a.axes, a.groups, a.group_size, a.node_size,
                                      a.puts != 0, a.devices);
  const size_t xs = a.x_shapes.size() / 4, ws = a.w_cols.size();
  const ffi::DataType dtype = ElementTypeOf(a.dtype);
  const bool takes = dtype == ffi::DataType::F32 || dtype == ffi::DataType::F64 ||
                     dtype == ffi::DataType::BF16 || dtype == ffi::DataType::F16;
  const size_t results = (a.kind == MatmulKind::kGather ? ws : 1) + (a.gathered != 0 ? 1 : 0);
  if (error.empty() && (!takes || xs == 0 || (xs != 1 && xs != ws) || a.transposed.size() != ws ||
                        a.group_size < 2 || a.puts != 0 || results > kMostResults)) {
    error = site->gpu_.what() + ": bad attributes. Compile this program anew";
  }
  if (!error.empty()) return ffi::Unexpected(ffi::Error::InvalidArgument(error));
  site->kind_ = a.kind;
  site->xs_ = xs;
  site->in_ = TypeOf(dtype);
  site->out_ = a.wide != 0 ? GemmType::kF32 : site->in_;
  site->tf32_ = a.tf32 != 0;
  site->gathered_ = a.gathered != 0;
  const auto size = [&](size_t i) { return static_cast<size_t>(a.x_shapes[i]); };
  site->shape_ = {
      static_cast<Cut>(a.cut), static_cast<int>(a.group_size), size(0), size(1), size(2), {}};
  for (size_t i = 0; i < ws; ++i) {
    site->shape_.products.push_back(
        {size((xs == 1 ? 0 : i) * 4 + 3), static_cast<size_t>(a.w_cols[i]), a.transposed[i] != 0});
  }
  // Algorithms are measured while no peer waits: for the slots there are in most cases, as
  // it is not known before the first call how large they are.
  const auto& local = GpuWorld::Get().local();
  if (!local.empty()) {
    std::vector<int> ordinals;
    for (const auto& [ordinal, id] : local) ordinals.push_back(ordinal);
    error = GpuGemm::Get().Start(ordinals);
    constexpr int64_t kLarge = std::numeric_limits<int64_t>::max() / 64;
    for (const MatmulStep& step : site->Program(0, kLarge)) {
      if (error.empty() && step.kind == StepKind::kProduct) {
        GpuGemm::Get().PlanOf(ordinals[0], site->KeyOf(step), &error);
      }
    }
    if (!error.empty()) return ffi::Unexpected(Internal(site->gpu_.what() + ": " + error));
  }
  return {std::move(site)};
}

MatmulGpuSite::~MatmulGpuSite() {
  for (auto& [ordinal, device] : devices_) {
    const CurrentDevice current(ordinal);
    for (const cudaEvent_t event : device->events) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    for (int s = 1; s < kMatmulStreams; ++s) {
      if (device->streams[s] != nullptr) cudaStreamDestroy(device->streams[s]);
    }
  }
}

std::vector<MatmulStep> MatmulGpuSite::Program(int rank, int64_t slot) const {
  MatmulProgram program(shape_, rank, slot);
  switch (kind_) {
    case MatmulKind::kScatter: return program.Scatter();
    case MatmulKind::kGather: return program.Gather(gathered_);
    default: return program.Reduce();
  }
}

// What is sent is of the type of x where x is gathered, and else of that of the result.
int64_t MatmulGpuSite::SizeAt(const Place& place) const {
  switch (place.space) {
    case Space::kOut: return SizeOf(out_);
    case Space::kSlot: return SizeOf(kind_ == MatmulKind::kGather ? in_ : out_);
    default: return SizeOf(in_);
  }
}

GemmKey MatmulGpuSite::KeyOf(const MatmulStep& step) const {
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
          in_,
          out_,
          step.transposed,
          step.accumulates,
          tf32_ && in_ == GemmType::kF32,
          align(step.x),
          align(step.w),
          align(c),
          align(step.d)};
}

uint64_t MatmulGpuSite::Hash() const {
  uint64_t hash = Mixed(static_cast<uint64_t>(kind_), static_cast<uint64_t>(shape_.cut));
  for (const uint64_t word :
       {static_cast<uint64_t>(shape_.batch), static_cast<uint64_t>(shape_.outer),
        static_cast<uint64_t>(shape_.rows), static_cast<uint64_t>(in_), static_cast<uint64_t>(out_),
        static_cast<uint64_t>(xs_)}) {
    hash = Mixed(hash, word);
  }
  for (const Product& p : shape_.products) hash = Mixed(Mixed(hash, p.inner), p.cols);
  return hash;
}

std::string MatmulGpuSite::DeviceAt(int32_t ordinal, Device** device) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Device>& there = devices_[ordinal];
  if (there == nullptr) {
    auto made = std::make_unique<Device>();
    if (std::string error = MakeDevice(ordinal, made.get()); !error.empty()) return error;
    there = std::move(made);
  }
  *device = there.get();
  return "";
}

std::string MatmulGpuSite::MakeDevice(int32_t ordinal, Device* device) {
  const GpuChannel* channel = nullptr;
  size_t bytes = 0;
  std::string error = gpu_.ExchangeAt(ordinal, &channel, &bytes);
  if (!error.empty()) return error;
  error = GpuGemm::Get().Start({ordinal});
  if (!error.empty()) return gpu_.what() + ": " + error;
  ExchangeCall& call = device->call;
  call.channel = *channel;
  call.layout = ExchangeLayout::Carve(channel->own, shape_.ranks, bytes);
  call.call = gpu_.CallOf(Hash()) & kCallMask;
  call.busy = GpuGemm::Get().Busy(ordinal);

  const int64_t size = SizeAt({Space::kSlot, 0, 0, 0});
  const int64_t slot = static_cast<int64_t>(call.layout.slot_bytes) / size;
  for (const MatmulStep& step : Program(channel->shape.rank, slot)) {
    // Heaps at one distance take the matrices of one product.
    char* const* const heaps = channel->heaps + step.d.place.peer;
    const int64_t distance = step.over_peers ? heaps[1] - heaps[0] : 0;
    bool alike = distance % (size * 16) == 0;
    for (int64_t i = 1; step.over_peers && i < step.batch; ++i) {
      alike = alike && heaps[i] - heaps[i - 1] == distance;
    }
    if (!step.over_peers || (alike && distance > 0)) {
      device->steps.push_back(step);
      device->steps.back().d.block = step.over_peers ? distance / size : step.d.block;
      continue;
    }
    for (int64_t i = 0; i < step.batch; ++i) {
      MatmulStep one = step;
      one.batch = 1;
      one.over_peers = false;
      one.x.place.at += i * step.x.block;
      one.w.place.at += i * step.w.block;
      one.d.place.peer += static_cast<int>(i);
      device->steps.push_back(one);
    }
  }
  if (device->steps.empty()) {
    return gpu_.what() + ": a row does not fit the slots of " +
           std::to_string(call.layout.slot_bytes) +
           " bytes. Set JAX_OVERLAP_HEAP_BYTES to more, in all processes";
  }
  const CurrentDevice current(ordinal);
  cudaError_t status = cudaSuccess;
  for (const MatmulStep& step : device->steps) {
    device->plans.push_back(nullptr);
    device->events.push_back(nullptr);
    if (step.kind == StepKind::kProduct) {
      device->plans.back() = GpuGemm::Get().PlanOf(ordinal, KeyOf(step), &error);
      if (device->plans.back() == nullptr) return gpu_.what() + ": " + error;
    }
    if (step.kind == StepKind::kOrder && status == cudaSuccess) {
      status = cudaEventCreateWithFlags(&device->events.back(), cudaEventDisableTiming);
    }
  }
  for (int s = 1; s < kMatmulStreams && status == cudaSuccess; ++s) {
    status = cudaStreamCreateWithFlags(&device->streams[s], cudaStreamNonBlocking);
  }
  return status == cudaSuccess ? "" : gpu_.what() + ": " + cudaGetErrorString(status);
}

// At the start of each execution of a program, for all of its calls in one order
// (ops/psum.cu says why).
ffi::Error MatmulGpuSite::Initialize(int32_t ordinal) {
  std::string error = UnacknowledgedOnGpu();
  Device* device = nullptr;
  if (error.empty()) error = DeviceAt(ordinal, &device);
  return error.empty() ? ffi::Error::Success() : Internal(error);
}

ffi::Error MatmulGpuSite::Execute(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                                  ffi::RemainingRets rets) {
  Device* device = nullptr;
  std::string error = DeviceAt(ordinal, &device);
  if (!error.empty()) return Internal(error);
  const size_t ws = shape_.products.size();
  const size_t outs = kind_ == MatmulKind::kGather ? ws : 1;
  if (args.size() != xs_ + ws || rets.size() != outs + (gathered_ ? 1 : 0)) {
    return Internal(gpu_.what() + ": bad operands. Compile this program anew");
  }
  Arrays arrays;
  ExchangeCall call = device->call;
  arrays.call = &call;
  const auto add = [&](const void* data, std::vector<char*>* to) {
    if (reinterpret_cast<uintptr_t>(data) % kOperandAlign != 0) {
      error = gpu_.what() + ": an operand does not start at a multiple of " +
              std::to_string(kOperandAlign) + " bytes, as all of XLA's do";
    }
    to->push_back(static_cast<char*>(const_cast<void*>(data)));
  };
  for (size_t i = 0; i < args.size(); ++i) {
    const auto in = args.get<ffi::AnyBuffer>(i);
    if (in.has_error()) return Internal(gpu_.what() + ": bad operands");
    add(in->untyped_data(), i < xs_ ? &arrays.x : &arrays.w);
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (out.has_error()) return Internal(gpu_.what() + ": bad results");
    add((*out)->untyped_data(), &arrays.out);
    call.results[i] = {(*out)->untyped_data(), (*out)->size_bytes()};
  }
  if (gathered_) arrays.gathered = arrays.out[outs];
  if (error.empty()) error = Run(*device, ordinal, arrays, stream);
  return error.empty() ? ffi::Error::Success() : Internal(error);
}

std::string MatmulGpuSite::Run(const Device& device, int32_t ordinal, const Arrays& arrays,
                               cudaStream_t stream) const {
  const auto on = [&](int s) { return s == 0 ? stream : device.streams[s]; };
  for (size_t i = 0; i < device.steps.size(); ++i) {
    const MatmulStep& step = device.steps[i];
    const ExchangeCall& call = *arrays.call;
    cudaError_t status = cudaSuccess;
    switch (step.kind) {
      case StepKind::kBegin:
        status = LaunchBegin(call, step.half, step.first, on(step.stream));
        break;
      case StepKind::kArrive:
        status = LaunchArrive(call, step.half, step.peer, on(step.stream));
        break;
      case StepKind::kWait: status = LaunchWait(call, step.half, step.peer, on(step.stream)); break;
      case StepKind::kEnd: status = LaunchEnd(call, step.half, step.last, on(step.stream)); break;
      case StepKind::kOrder:
        status = cudaEventRecord(device.events[i], on(step.of));
        if (status == cudaSuccess) {
          status = cudaStreamWaitEvent(on(step.stream), device.events[i], 0);
        }
        break;
      case StepKind::kCopy: status = Copy(step, arrays, on(step.stream)); break;
      case StepKind::kSum: status = Sum(step, device, arrays, on(step.stream)); break;
      case StepKind::kProduct: {
        const auto at = [&](const Rows& rows) {
          return arrays.At(rows.place, step.half, SizeAt(rows.place));
        };
        const std::string error = GpuGemm::Get().Launch(
            ordinal, *device.plans[i], at(step.x), at(step.w),
            at(step.accumulates ? step.c : step.d), at(step.d), on(step.stream));
        if (!error.empty()) return gpu_.what() + ": " + error;
      }
    }
    if (status != cudaSuccess) return gpu_.what() + ": " + cudaGetErrorString(status);
  }
  return "";
}

// As few copies as there can be: of all, of blocks, or of rows.
cudaError_t MatmulGpuSite::Copy(const MatmulStep& step, const Arrays& arrays,
                                cudaStream_t stream) const {
  const size_t size = SizeAt(step.x.place);
  char* from = arrays.At(step.x.place, step.half, size);
  char* to = arrays.At(step.d.place, step.half, size);
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

cudaError_t MatmulGpuSite::Sum(const MatmulStep& step, const Device& device, const Arrays& arrays,
                               cudaStream_t stream) const {
  Place first = step.x.place;
  first.index = 0;
  const int64_t size = SizeOf(out_);
  const SumShape shape{step.batch,
                       step.m,
                       step.n,
                       arrays.At(first, step.half, size),
                       device.call.layout.slot_bytes,
                       shape_.ranks,
                       step.x.block,
                       step.x.ld,
                       arrays.At(step.d.place, step.half, size),
                       step.d.block,
                       step.d.ld};
  switch (out_) {
    case GemmType::kF64: return LaunchSum<double>(shape, kSumBlocks, stream);
    case GemmType::kBF16: return LaunchSum<BFloat16>(shape, kSumBlocks, stream);
    case GemmType::kF16: return LaunchSum<Float16>(shape, kSumBlocks, stream);
    default: return LaunchSum<float>(shape, kSumBlocks, stream);
  }
}

}  // namespace jax_overlap
