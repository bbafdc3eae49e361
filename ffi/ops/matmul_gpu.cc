#include "ops/matmul_gpu.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/gpu_team.h"

namespace jax_overlap {

namespace ffi = xla::ffi;

namespace {

ffi::Error Internal(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInternal, text); }

// The type that numpy calls so; nothing if products do not take it.
std::optional<GemmType> TypeOf(std::string_view name) {
  constexpr struct {
    std::string_view name;
    GemmType type;
  } kTypes[] = {{"float32", GemmType::kF32},        {"float64", GemmType::kF64},
                {"bfloat16", GemmType::kBF16},      {"float16", GemmType::kF16},
                {"float8_e4m3fn", GemmType::kE4M3}, {"float8_e5m2", GemmType::kE5M2}};
  for (const auto& type : kTypes) {
    if (type.name == name) return type.type;
  }
  return {};
}

// Half types and float8 may be left as they are added, in float32.
bool Takes(GemmType in, GemmType in_w, GemmType out) {
  if (IsFloat8(in)) return IsFloat8(in_w) && !IsFloat8(out) && out != GemmType::kF64;
  const bool half = in == GemmType::kBF16 || in == GemmType::kF16;
  return in_w == in && (out == in || (half && out == GemmType::kF32));
}

}  // namespace

ffi::ErrorOr<std::unique_ptr<MatmulGpuSite>> MatmulGpuSite::Make(const Attributes& a) {
  auto site = std::make_unique<MatmulGpuSite>();
  std::string error = site->gpu_.Init(a.op, a.abi, a.axes, a.groups, a.group_size, a.node_size,
                                      a.puts != 0, a.devices);
  const size_t xs = a.x_shapes.size() / 4, ws = a.w_cols.size();
  const auto in = TypeOf(a.dtype), in_w = TypeOf(a.w_dtype), out = TypeOf(a.out_dtype);
  const bool takes = in && in_w && out && Takes(*in, *in_w, *out);
  const size_t results = (a.kind == MatmulKind::kGather ? ws : 1) + (a.gathered != 0 ? 1 : 0);
  if (error.empty() && (!takes || xs == 0 || (xs != 1 && xs != ws) || a.transposed.size() != ws ||
                        a.group_size < 2 || a.puts != 0 || results > kMostResults)) {
    error = site->gpu_.what() + ": bad attributes. Compile this program anew";
  }
  if (!error.empty()) return ffi::Unexpected(ffi::Error::InvalidArgument(error));
  const auto size = [&](size_t i) { return static_cast<size_t>(a.x_shapes[i]); };
  MatmulSpec& spec = site->spec_;
  spec.kind = a.kind;
  spec.xs = xs;
  spec.in = *in;
  spec.in_w = *in_w;
  spec.out = *out;
  spec.fast = a.fast != 0;
  spec.gathered = a.gathered != 0;
  spec.shape = {
      static_cast<Cut>(a.cut), static_cast<int>(a.group_size), size(0), size(1), size(2), {}};
  for (size_t i = 0; i < ws; ++i) {
    spec.shape.products.push_back(
        {size((xs == 1 ? 0 : i) * 4 + 3), static_cast<size_t>(a.w_cols[i]), a.transposed[i] != 0});
  }
  error = site->Tune();
  if (!error.empty()) return ffi::Unexpected(Internal(site->gpu_.what() + ": " + error));
  return {std::move(site)};
}

// Algorithms are measured when a site is made, as no peer waits for that: for slots that are
// large enough, since how large they are is known when the first call begins.
std::string MatmulGpuSite::Tune() const {
  std::string error;
  for (const auto& [ordinal, rank] : gpu_.LocalRanks()) {
    if (GpuGemm::Get().LaneOf(ordinal, &error) == nullptr) return error;
    std::vector<MatmulStep> steps = spec_.Program(rank, kLargeSlot);
    error = spec_.Fuse(ordinal, &steps);
    if (!error.empty()) return error;
    for (const MatmulStep& step : steps) {
      if (step.kind != StepKind::kProduct) continue;
      if (GpuGemm::Get().PlanOf(ordinal, spec_.KeyOf(step), &error) == nullptr) return error;
    }
  }
  return "";
}

std::string MatmulGpuSite::LaunchesOf(int32_t ordinal, const MatmulLaunches** launches) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (launches_.empty()) {
    if (std::string error = MakeLaunches(); !error.empty()) {
      launches_.clear();
      return error;
    }
  }
  const auto there = launches_.find(ordinal);
  if (there == launches_.end()) return gpu_.NotOfMesh(ordinal);
  *launches = there->second.get();
  return "";
}

// For all devices of this process at once: to allocate, load or measure on one of them may have
// to wait for a kernel of another that has begun, and waits for it. And if one fails, all do.
std::string MatmulGpuSite::MakeLaunches() {
  for (const auto& [ordinal, rank] : gpu_.LocalRanks()) {
    const GpuChannel* channel = nullptr;
    size_t bytes = 0;
    std::string error = gpu_.ExchangeAt(ordinal, &channel, &bytes);
    if (!error.empty()) return error;
    const GpuLane* const lane = GpuGemm::Get().LaneOf(ordinal, &error);
    if (lane == nullptr) return gpu_.what() + ": " + error;
    launches_[ordinal] =
        MatmulLaunches::Make(spec_, *lane, *channel, bytes, gpu_.CallOf(spec_.Hash()), &error);
    if (!error.empty()) return gpu_.what() + ": " + error;
  }
  return "";
}

// At the start of each execution of a program, for all of its calls in one order
// (ops/psum_gpu.cc says why).
ffi::Error MatmulGpuSite::Initialize(int32_t ordinal) {
  std::string error = UnacknowledgedOnGpu();
  const MatmulLaunches* launches = nullptr;
  if (error.empty()) error = LaunchesOf(ordinal, &launches);
  return error.empty() ? ffi::Error::Success() : Internal(error);
}

ffi::Error MatmulGpuSite::Execute(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                                  ffi::RemainingRets rets) {
  const MatmulLaunches* launches = nullptr;
  std::string error = LaunchesOf(ordinal, &launches);
  if (!error.empty()) return Internal(error);
  const size_t ws = spec_.shape.products.size(), outs = spec_.results();
  if (args.size() != spec_.xs + ws || rets.size() != outs + (spec_.gathered ? 1 : 0)) {
    return Internal(gpu_.what() + ": bad operands. Compile this program anew");
  }
  MatmulLaunches::Arrays arrays;
  std::vector<ExchangeCall::Result> results;
  const auto add = [&](const void* data, std::vector<char*>* to) {
    if (reinterpret_cast<uintptr_t>(data) % MatmulLaunches::kAlign != 0) {
      error = gpu_.what() + ": an operand does not start at a multiple of " +
              std::to_string(MatmulLaunches::kAlign) + " bytes, as all of XLA's do";
    }
    to->push_back(static_cast<char*>(const_cast<void*>(data)));
  };
  for (size_t i = 0; i < args.size(); ++i) {
    const auto in = args.get<ffi::AnyBuffer>(i);
    if (in.has_error()) return Internal(gpu_.what() + ": bad operands");
    add(in->untyped_data(), i < spec_.xs ? &arrays.x : &arrays.w);
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (out.has_error()) return Internal(gpu_.what() + ": bad results");
    add((*out)->untyped_data(), &arrays.out);
    results.push_back({(*out)->untyped_data(), (*out)->size_bytes()});
  }
  if (spec_.gathered) arrays.gathered = arrays.out[outs];
  if (!error.empty()) return Internal(error);
  error = launches->Run(arrays, results, stream);
  return error.empty() ? ffi::Error::Success() : Internal(gpu_.what() + ": " + error);
}

}  // namespace jax_overlap
