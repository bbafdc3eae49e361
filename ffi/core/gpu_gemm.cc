#include "core/gpu_gemm.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "core/cublaslt.h"
#include "core/gpu_device.h"
#include "core/gpu_memory.h"
#include "core/hopper_gemm.h"
#include "core/schedule.h"
#include "core/tuning_cache.h"

namespace jax_overlap {

namespace {

struct Algorithm {
  bool by_cutlass = false;
  cublasLtMatmulAlgo_t lt = {};  // else
};

}  // namespace

struct GemmPlan {
  GemmKey key;
  Algorithm algorithm;
  // For cuBLASLt, of the device.
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t op;
  cublasLtMatrixLayout_t w, x, c, d;
  int multiprocessors;
};

namespace {

constexpr size_t kWorkspaceBytes = 32 << 20;  // as cuBLAS itself takes on Hopper
// Smaller products are over before another algorithm makes a difference.
constexpr double kTuneFromFlops = 4e9;
constexpr size_t kTuneMostBytes = size_t{8} << 30;
constexpr int kCandidates = 24;
// Of products that take so long, some 30 ms, only the likeliest are measured, and once.
constexpr double kLongFlops = 2e12, kLongHalfFlops = 2e13;
constexpr size_t kLongCandidates = 4;
// The best of a first round are measured again.
constexpr size_t kFinalists = 5;
constexpr int kRounds = 9;
constexpr int kCalls = 3;  // of a round

// How long a kernel that scatters looks for what a peer has sent: at least, and by the inner
// dimension, which gives the time of a tile.
constexpr uint64_t kPatienceNs = 10000, kPatienceNsOfInner = 8;

double FlopsOf(const GemmKey& key) { return 2.0 * key.m * key.n * key.k * key.batch; }
bool IsLong(const GemmKey& key) {
  return FlopsOf(key) >= (SizeOf(key.in) <= 2 ? kLongHalfFlops : kLongFlops);
}

cudaDataType TypeOf(GemmType type) {
  switch (type) {
    case GemmType::kF64: return CUDA_R_64F;
    case GemmType::kBF16: return CUDA_R_16BF;
    case GemmType::kF16: return CUDA_R_16F;
    case GemmType::kE4M3: return CUDA_R_8F_E4M3;
    case GemmType::kE5M2: return CUDA_R_8F_E5M2;
    default: return CUDA_R_32F;
  }
}

cublasComputeType_t ComputeTypeOf(const GemmKey& key) {
  if (key.in == GemmType::kF64) return CUBLAS_COMPUTE_64F;
  return key.in == GemmType::kF32 && key.fast != 0 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                   : CUBLAS_COMPUTE_32F;
}

// An algorithm in a file.
constexpr char kCutlass[] = "CUTLASS";

std::string TextOf(const Algorithm& algorithm) {
  if (algorithm.by_cutlass) return kCutlass;
  std::string text;
  for (const uint64_t word : algorithm.lt.data) {
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(word));
    text += digits;
  }
  return text;
}
bool Parse(const std::string& text, Algorithm* algorithm) {
  algorithm->by_cutlass = text == kCutlass;
  if (algorithm->by_cutlass) return true;
  auto& data = algorithm->lt.data;
  if (text.size() != 16 * std::size(data)) return false;
  for (size_t i = 0; i < std::size(data); ++i) {
    data[i] = std::strtoull(text.substr(16 * i, 16).c_str(), nullptr, 16);
  }
  return true;
}

// The algorithms, the fastest first: by the median of some rounds, in which they take turns.
// Nothing waits in between, as a GPU that is always busy has other clocks, by which the order
// changes. Those that fail are left out.
template <class Run>
std::vector<Algorithm> Ordered(const std::vector<Algorithm>& algorithms, const Run& run, int rounds,
                               cudaStream_t stream) {
  std::vector<cudaEvent_t> marks(rounds * algorithms.size() + 1);
  std::vector<bool> failed(algorithms.size());
  for (cudaEvent_t& mark : marks) cudaEventCreate(&mark);
  cudaEventRecord(marks[0], stream);
  for (size_t i = 0; i + 1 < marks.size(); ++i) {
    const size_t a = i % algorithms.size();
    for (int call = 0; call < kCalls; ++call) failed[a] = !run(algorithms[a]) || failed[a];
    cudaEventRecord(marks[i + 1], stream);
  }
  cudaStreamSynchronize(stream);
  std::vector<std::pair<float, size_t>> times;
  for (size_t a = 0; a < algorithms.size(); ++a) {
    std::vector<float> samples;
    for (size_t i = a; i + 1 < marks.size(); i += algorithms.size()) {
      float ms = 0;
      failed[a] = cudaEventElapsedTime(&ms, marks[i], marks[i + 1]) != cudaSuccess || failed[a];
      samples.push_back(ms);
    }
    std::sort(samples.begin(), samples.end());
    if (!failed[a]) times.push_back({samples[samples.size() / 2], a});
  }
  for (const cudaEvent_t mark : marks) cudaEventDestroy(mark);
  std::sort(times.begin(), times.end());
  std::vector<Algorithm> ordered;
  for (const auto& [ms, a] : times) ordered.push_back(algorithms[a]);
  return ordered;
}

}  // namespace

struct GpuGemm::State {
  // Each has a mutex: who sets it up or measures on it may have to wait for it, and its kernel
  // for another device, whose thread must not wait here.
  struct Device {
    std::mutex mutex;
    cublasLtHandle_t handle = nullptr;
    cudaDeviceProp properties;
    std::unique_ptr<GpuLane> lane;
    std::map<std::string, std::unique_ptr<GemmPlan>> plans;
  };
  std::mutex mutex;  // of the following
  std::string folder;
  const CublasLt* lt = nullptr;
  std::map<int, Device> devices;
  std::unique_ptr<TuningCache> cache;

  Device& DeviceAt(int ordinal);
  std::string Start(int ordinal, Device* device);
  std::unique_ptr<GpuLane> MakeLane(int ordinal, Device* device, std::string* error);
  std::string Make(const Device& device, const GemmKey& key, GemmPlan* plan);
  std::string Choose(const Device& device, GemmPlan* plan);
  TuningCache& CacheOf(const Device& device);
  std::string Remembered(const Device& device, const std::string& key);
  void Remember(const Device& device, const std::string& key, const std::string& algorithm);
  bool Serves(const Device& device, const GemmPlan& plan, const Algorithm& algorithm) const;
  std::vector<Algorithm> Candidates(const GemmPlan& plan, bool tunes) const;
  std::optional<Algorithm> Fastest(const Device& device, const GemmKey& key,
                                   const std::vector<Algorithm>& candidates);
  std::string Run(const GemmPlan& plan, const Algorithm& algorithm, const void* x, const void* w,
                  const void* c, void* d, void* workspace, cudaStream_t stream) const;
};

GpuGemm::GpuGemm() : state_(new State) {}

GpuGemm& GpuGemm::Get() {
  static GpuGemm* const gemm = new GpuGemm;
  return *gemm;
}

void GpuGemm::SetCacheFolder(std::string folder) { state_->folder = std::move(folder); }

const GpuLane* GpuGemm::LaneOf(int ordinal, std::string* error) {
  State::Device& device = state_->DeviceAt(ordinal);
  std::lock_guard<std::mutex> lock(device.mutex);
  if (device.lane == nullptr) device.lane = state_->MakeLane(ordinal, &device, error);
  return device.lane.get();
}

std::unique_ptr<GpuLane> GpuGemm::MakeLane(int ordinal, std::string* error) {
  State::Device& device = state_->DeviceAt(ordinal);
  std::lock_guard<std::mutex> lock(device.mutex);
  return state_->MakeLane(ordinal, &device, error);
}

GpuGemm::State::Device& GpuGemm::State::DeviceAt(int ordinal) {
  std::lock_guard<std::mutex> lock(mutex);
  return devices[ordinal];
}

std::string GpuGemm::State::Start(int ordinal, Device* device) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    std::string error;
    if (lt == nullptr) lt = CublasLt::Get(&error);
    if (lt == nullptr) return error;
  }
  if (device->handle != nullptr) return "";
  cublasLtHandle_t handle;
  if (cudaGetDeviceProperties(&device->properties, ordinal) != cudaSuccess ||
      lt->Create(&handle) != CUBLAS_STATUS_SUCCESS) {
    return "cuBLASLt does not start on device " + std::to_string(ordinal);
  }
  device->handle = handle;
  return "";
}

std::unique_ptr<GpuLane> GpuGemm::State::MakeLane(int ordinal, Device* device, std::string* error) {
  const CurrentDevice current(ordinal);
  const RelaxedCapture relaxed;
  *error = Start(ordinal, device);
  if (!error->empty()) return nullptr;
  auto lane = std::make_unique<GpuLane>();
  lane->ordinal = ordinal;
  constexpr size_t kWord = 256;
  *error = AllocateForGood(ordinal, kWorkspaceBytes + kWord, &lane->workspace);
  if (!error->empty()) return nullptr;
  lane->busy = reinterpret_cast<int32_t*>(lane->workspace + kWorkspaceBytes);
  int least = 0, greatest = 0;  // priorities
  cudaDeviceGetStreamPriorityRange(&least, &greatest);
  for (cudaStream_t& stream : lane->streams) {
    if (cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest) != cudaSuccess) {
      *error = "no streams on device " + std::to_string(ordinal);
      return nullptr;
    }
  }
  return lane;
}

const GemmPlan* GpuGemm::PlanOf(int ordinal, const GemmKey& key, std::string* error) {
  State::Device& device = state_->DeviceAt(ordinal);
  std::lock_guard<std::mutex> lock(device.mutex);
  std::unique_ptr<GemmPlan>& plan = device.plans[key.FullText()];
  if (plan != nullptr) return plan.get();
  auto made = std::make_unique<GemmPlan>();
  const CurrentDevice current(ordinal);
  *error = state_->Make(device, key, made.get());
  if (error->empty()) *error = state_->Choose(device, made.get());
  if (!error->empty()) return nullptr;
  plan = std::move(made);
  return plan.get();
}

// cuBLASLt is column-major: it computes the transpose of all, d' = w' x'.
std::string GpuGemm::State::Make(const Device& device, const GemmKey& key, GemmPlan* plan) {
  plan->key = key;
  plan->handle = device.handle;
  plan->multiprocessors = device.properties.multiProcessorCount;
  const bool wide = key.in == GemmType::kF64;
  const cudaDataType in = TypeOf(key.in), in_w = TypeOf(key.in_w), out = TypeOf(key.out);
  bool made = lt->MatmulDescCreate(&plan->op, ComputeTypeOf(key), wide ? CUDA_R_64F : CUDA_R_32F) ==
              CUBLAS_STATUS_SUCCESS;
  const cublasOperation_t transpose = CUBLAS_OP_T;
  if (made && key.transposed != 0) {
    made = lt->MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                      sizeof(transpose)) == CUBLAS_STATUS_SUCCESS;
  }
  if (made && IsFloat8(key.in)) {
    const int8_t fast = key.fast != 0;
    made = lt->MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast,
                                      sizeof(fast)) == CUBLAS_STATUS_SUCCESS;
  }
  const auto layout = [&](cublasLtMatrixLayout_t* to, cudaDataType type, int64_t rows, int64_t cols,
                          int64_t ld, int64_t block) {
    if (!made) return;
    made = lt->MatrixLayoutCreate(to, type, rows, cols, ld) == CUBLAS_STATUS_SUCCESS;
    if (!made || key.batch == 1) return;
    const int32_t batch = static_cast<int32_t>(key.batch);
    made = lt->MatrixLayoutSetAttribute(*to, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                        sizeof(batch)) == CUBLAS_STATUS_SUCCESS &&
           lt->MatrixLayoutSetAttribute(*to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &block,
                                        sizeof(block)) == CUBLAS_STATUS_SUCCESS;
  };
  if (key.transposed != 0) {
    layout(&plan->w, in_w, key.k, key.n, key.ldw, key.w_block);
  } else {
    layout(&plan->w, in_w, key.n, key.k, key.ldw, key.w_block);
  }
  layout(&plan->x, in, key.k, key.m, key.ldx, key.x_block);
  layout(&plan->c, out, key.n, key.m, key.ldc, key.c_block);
  layout(&plan->d, out, key.n, key.m, key.ldd, key.d_block);
  return made ? "" : "cuBLASLt does not take a matrix of " + key.FullText();
}

// The caller holds the mutex.
TuningCache& GpuGemm::State::CacheOf(const Device& device) {
  if (cache == nullptr) {
    std::string name = device.properties.name;
    std::replace_if(name.begin(), name.end(), [](char c) { return !isalnum(c); }, '_');
    name += "-cublasLt" + std::to_string(lt->GetVersion()) + HopperGemmName();
    cache = std::make_unique<TuningCache>(folder.empty() ? "" : folder + "/" + name);
  }
  return *cache;
}

std::string GpuGemm::State::Remembered(const Device& device, const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex);
  return CacheOf(device).Get(key);
}

void GpuGemm::State::Remember(const Device& device, const std::string& key,
                              const std::string& algorithm) {
  std::lock_guard<std::mutex> lock(mutex);
  CacheOf(device).Put(key, algorithm);
}

std::string GpuGemm::State::Choose(const Device& device, GemmPlan* plan) {
  const GemmKey& key = plan->key;
  if (Parse(Remembered(device, key.Text()), &plan->algorithm) &&
      Serves(device, *plan, plan->algorithm)) {
    Fastest(device, key, {plan->algorithm});
    return "";
  }
  const bool tunes = FlopsOf(key) >= kTuneFromFlops;
  std::vector<Algorithm> candidates = Candidates(*plan, tunes);
  if (candidates.empty()) return "cuBLASLt has no algorithm for " + key.FullText();
  if (IsLong(key)) candidates.resize(std::min(candidates.size(), kLongCandidates));
  if (tunes && HopperGemmTakes(key, device.properties)) candidates.push_back({true, {}});
  plan->algorithm = candidates[0];
  const auto fastest = Fastest(device, key, candidates);
  if (tunes && fastest) {
    plan->algorithm = *fastest;
    Remember(device, key.Text(), TextOf(*fastest));
  }
  return "";
}

// Whether what is in a file can be.
bool GpuGemm::State::Serves(const Device& device, const GemmPlan& plan,
                            const Algorithm& algorithm) const {
  if (algorithm.by_cutlass) return HopperGemmTakes(plan.key, device.properties);
  cublasLtMatmulHeuristicResult_t result;
  return lt->MatmulAlgoCheck(plan.handle, plan.op, plan.w, plan.x, plan.c, plan.d, &algorithm.lt,
                             &result) == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= kWorkspaceBytes;
}

// Of cuBLASLt, the likeliest first.
std::vector<Algorithm> GpuGemm::State::Candidates(const GemmPlan& plan, bool tunes) const {
  const GemmKey& key = plan.key;
  cublasLtMatmulPreference_t preference;
  bool made = lt->MatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS;
  if (!made) return {};
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
    made = made && lt->MatmulPreferenceSetAttribute(preference, what, &value, sizeof(value)) ==
                       CUBLAS_STATUS_SUCCESS;
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  // In place, sums of parts would be added in the peer's memory; in the type of the result
  // they would be rounded once each.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(tunes ? CUBLASLT_REDUCTION_SCHEME_NONE
                                     : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.w_align));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.x_align));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.c_align));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.d_align));
  std::vector<cublasLtMatmulHeuristicResult_t> found(tunes ? kCandidates : 1);
  int count = 0;
  if (made) {
    lt->MatmulAlgoGetHeuristic(plan.handle, plan.op, plan.w, plan.x, plan.c, plan.d, preference,
                               static_cast<int>(found.size()), found.data(), &count);
  }
  lt->MatmulPreferenceDestroy(preference);
  std::vector<Algorithm> candidates;
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS) candidates.push_back({false, found[i].algo});
  }
  return candidates;
}

// Measures on a stream and in memory of its own. Nothing if that cannot be had. Of one
// candidate the kernel is loaded: while another spins, that may wait for that one to end.
std::optional<Algorithm> GpuGemm::State::Fastest(const Device& device, const GemmKey& key,
                                                 const std::vector<Algorithm>& candidates) {
  const RelaxedCapture relaxed;
  const auto span = [&](int64_t rows, int64_t ld, int64_t block) {
    return static_cast<size_t>((key.batch - 1) * block + rows * ld);
  };
  // Matrices next to each other: where they are far apart, there is not so much memory. Each
  // begins at a whole line, as the algorithms may expect it to.
  const auto next = [&](int64_t ld) { return static_cast<int64_t>(RoundUp(key.m * ld, 256)); };
  GemmKey near = key;
  near.x_block = std::min(key.x_block, next(key.ldx));
  near.d_block = next(key.ldd);
  near.c_block = next(key.ldc);
  const size_t x = span(key.m, key.ldx, near.x_block) * SizeOf(key.in);
  const size_t w = span(key.transposed ? key.n : key.k, key.ldw, key.w_block) * SizeOf(key.in_w);
  const size_t d = span(key.m, key.ldd, near.d_block) * SizeOf(key.out);
  const size_t c = key.accumulates ? span(key.m, key.ldc, near.c_block) * SizeOf(key.out) : 0;
  if (x + w + c + d > kTuneMostBytes) return {};
  GemmPlan local = {};
  if (!Make(device, near, &local).empty()) return {};

  cudaStream_t stream;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return {};
  char* memory = nullptr;
  constexpr size_t kAlign = 256;
  const size_t at_w = RoundUp(x, kAlign), at_c = at_w + RoundUp(w, kAlign);
  const size_t at_d = at_c + RoundUp(c, kAlign), workspace = at_d + RoundUp(d, kAlign);
  std::optional<Algorithm> best;
  if (cudaMallocAsync(reinterpret_cast<void**>(&memory), workspace + kWorkspaceBytes, stream) ==
      cudaSuccess) {
    FillForTuning(memory, at_d, stream);
    const auto run = [&](const Algorithm& algorithm) {
      return Run(local, algorithm, memory, memory + at_w, memory + at_c, memory + at_d,
                 memory + workspace, stream)
          .empty();
    };
    std::vector<Algorithm> able;  // the first run loads the kernel
    std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(able), run);
    if (able.size() > 1) able = Ordered(able, run, 1, stream);
    if (able.size() > 1 && !IsLong(key)) {
      able.resize(std::min(able.size(), kFinalists));
      able = Ordered(able, run, kRounds, stream);
    }
    if (!able.empty()) best = able[0];
    cudaFreeAsync(memory, stream);
  }
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  cudaGetLastError();  // what was not to be had, or failed, is no error of what follows
  return best;
}

std::string GpuGemm::State::Run(const GemmPlan& plan, const Algorithm& algorithm, const void* x,
                                const void* w, const void* c, void* d, void* workspace,
                                cudaStream_t stream) const {
  if (algorithm.by_cutlass) {
    return LaunchHopperGemm({plan.key, x, w, c, d, plan.multiprocessors}, stream);
  }
  static constexpr float kOne = 1, kZero = 0;
  static constexpr double kWideOne = 1, kWideZero = 0;
  const bool wide = plan.key.in == GemmType::kF64;
  const void* const one = wide ? static_cast<const void*>(&kWideOne) : &kOne;
  const void* const zero = wide ? static_cast<const void*>(&kWideZero) : &kZero;
  const cublasStatus_t status = lt->Matmul(
      plan.handle, plan.op, one, w, plan.w, x, plan.x, plan.key.accumulates != 0 ? one : zero, c,
      plan.c, d, plan.d, &algorithm.lt, workspace, kWorkspaceBytes, stream);
  return status == CUBLAS_STATUS_SUCCESS ? "" : "cuBLASLt failed: status " + std::to_string(status);
}

std::string GpuGemm::Launch(const GpuLane& lane, const GemmPlan& plan, const void* x, const void* w,
                            const void* c, void* d, cudaStream_t stream) {
  return state_->Run(plan, plan.algorithm, x, w, c, d, lane.workspace, stream);
}

bool GpuGemm::ScattersInOne(int ordinal, const GemmKey& peer, const GemmKey& own,
                            std::string* error) {
  State::Device& device = state_->DeviceAt(ordinal);
  std::lock_guard<std::mutex> lock(device.mutex);
  if (!HopperScatterTakes(peer, own, device.properties)) return false;
  const CurrentDevice current(ordinal);
  *error = LoadHopperScatter(own);
  return true;
}

std::string GpuGemm::LaunchScatter(const GpuLane& lane, HopperScatterCall call,
                                   cudaStream_t stream) {
  call.multiprocessors = state_->DeviceAt(lane.ordinal).properties.multiProcessorCount;
  // A tile of a peer that began as this rank did comes within the time of one.
  call.flags.patience_ns = kPatienceNs + kPatienceNsOfInner * call.own.k;
  return LaunchHopperScatter(call, stream);
}

}  // namespace jax_overlap
