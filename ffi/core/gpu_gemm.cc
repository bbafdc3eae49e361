#include "core/gpu_gemm.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "core/cublaslt.h"
#include "core/gpu_device.h"
#include "core/gpu_memory.h"
#include "core/schedule.h"
#include "core/tuning_cache.h"

namespace jax_overlap {

struct GemmPlan {
  cublasLtHandle_t handle;  // of the device
  cublasLtMatmulDesc_t op;
  cublasLtMatrixLayout_t w, x, c, d;
  cublasLtMatmulAlgo_t algo;
  bool accumulates;
  bool wide;  // alpha and beta are doubles
};

namespace {

constexpr size_t kWorkspaceBytes = 32 << 20;  // as cuBLAS itself takes on Hopper
// Smaller products are over before another algorithm makes a difference.
constexpr double kTuneFromFlops = 4e9;
constexpr size_t kTuneMostBytes = size_t{8} << 30;
constexpr int kCandidates = 8;
constexpr int kRepeats = 5;

cudaDataType TypeOf(GemmType type) {
  switch (type) {
    case GemmType::kF64: return CUDA_R_64F;
    case GemmType::kBF16: return CUDA_R_16BF;
    case GemmType::kF16: return CUDA_R_16F;
    default: return CUDA_R_32F;
  }
}

cublasComputeType_t ComputeTypeOf(const GemmKey& key) {
  if (key.in == GemmType::kF64) return CUBLAS_COMPUTE_64F;
  return key.tf32 != 0 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

std::string Hex(const cublasLtMatmulAlgo_t& algo) {
  std::string text;
  for (const uint64_t word : algo.data) {
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(word));
    text += digits;
  }
  return text;
}
bool FromHex(const std::string& text, cublasLtMatmulAlgo_t* algo) {
  if (text.size() != 16 * std::size(algo->data)) return false;
  for (size_t i = 0; i < std::size(algo->data); ++i) {
    algo->data[i] = std::strtoull(text.substr(16 * i, 16).c_str(), nullptr, 16);
  }
  return true;
}

}  // namespace

struct GpuGemm::State {
  std::mutex mutex;
  std::string folder;
  const CublasLt* lt = nullptr;
  std::map<int, cublasLtHandle_t> handles;
  std::map<int, std::unique_ptr<GpuLane>> lanes;
  std::unique_ptr<TuningCache> cache;
  std::map<std::pair<int, std::string>, std::unique_ptr<GemmPlan>> plans;

  std::unique_ptr<GpuLane> MakeLane(int ordinal, std::string* error);
  std::string Make(const GemmKey& key, GemmPlan* plan);
  std::string Choose(int ordinal, const GemmKey& key, GemmPlan* plan);
  std::optional<cublasLtMatmulAlgo_t> Fastest(
      cublasLtHandle_t handle, const GemmKey& key,
      const std::vector<cublasLtMatmulHeuristicResult_t>& candidates);
  cublasStatus_t Run(cublasLtHandle_t handle, const GemmPlan& plan,
                     const cublasLtMatmulAlgo_t& algo, const void* x, const void* w, const void* c,
                     void* d, void* workspace, cudaStream_t stream) const;
};

GpuGemm::GpuGemm() : state_(new State) {}

GpuGemm& GpuGemm::Get() {
  static GpuGemm* const gemm = new GpuGemm;
  return *gemm;
}

void GpuGemm::SetCacheFolder(std::string folder) { state_->folder = std::move(folder); }

const GpuLane* GpuGemm::LaneOf(int ordinal, std::string* error) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::unique_ptr<GpuLane>& lane = state_->lanes[ordinal];
  if (lane == nullptr) lane = state_->MakeLane(ordinal, error);
  return lane.get();
}

std::unique_ptr<GpuLane> GpuGemm::MakeLane(int ordinal, std::string* error) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->MakeLane(ordinal, error);
}

std::unique_ptr<GpuLane> GpuGemm::State::MakeLane(int ordinal, std::string* error) {
  if (lt == nullptr) lt = CublasLt::Get(error);
  if (lt == nullptr) return nullptr;
  const CurrentDevice current(ordinal);
  const RelaxedCapture relaxed;
  if (handles.count(ordinal) == 0 && lt->Create(&handles[ordinal]) != CUBLAS_STATUS_SUCCESS) {
    handles.erase(ordinal);
    *error = "cuBLASLt does not start on device " + std::to_string(ordinal);
    return nullptr;
  }
  auto lane = std::make_unique<GpuLane>();
  lane->ordinal = ordinal;
  constexpr size_t kWord = 256;
  *error = AllocateHeap(ordinal, kWorkspaceBytes + kWord, &lane->workspace);
  if (!error->empty()) return nullptr;
  lane->busy = reinterpret_cast<int32_t*>(lane->workspace + kWorkspaceBytes);
  for (cudaStream_t& stream : lane->streams) {
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
      *error = "no streams on device " + std::to_string(ordinal);
      return nullptr;
    }
  }
  return lane;
}

const GemmPlan* GpuGemm::PlanOf(int ordinal, const GemmKey& key, std::string* error) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::unique_ptr<GemmPlan>& plan = state_->plans[{ordinal, key.FullText()}];
  if (plan != nullptr) return plan.get();
  auto made = std::make_unique<GemmPlan>();
  *error = state_->Make(key, made.get());
  if (error->empty()) *error = state_->Choose(ordinal, key, made.get());
  if (!error->empty()) return nullptr;
  plan = std::move(made);
  return plan.get();
}

// cuBLASLt is column-major: it computes the transpose of all, d' = w' x'.
std::string GpuGemm::State::Make(const GemmKey& key, GemmPlan* plan) {
  plan->accumulates = key.accumulates != 0;
  plan->wide = key.in == GemmType::kF64;
  const cudaDataType in = TypeOf(key.in), out = TypeOf(key.out);
  bool made = lt->MatmulDescCreate(&plan->op, ComputeTypeOf(key),
                                   plan->wide ? CUDA_R_64F : CUDA_R_32F) == CUBLAS_STATUS_SUCCESS;
  const cublasOperation_t transpose = CUBLAS_OP_T;
  if (made && key.transposed != 0) {
    made = lt->MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                      sizeof(transpose)) == CUBLAS_STATUS_SUCCESS;
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
    layout(&plan->w, in, key.k, key.n, key.ldw, key.w_block);
  } else {
    layout(&plan->w, in, key.n, key.k, key.ldw, key.w_block);
  }
  layout(&plan->x, in, key.k, key.m, key.ldx, key.x_block);
  layout(&plan->c, out, key.n, key.m, key.ldc, key.c_block);
  layout(&plan->d, out, key.n, key.m, key.ldd, key.d_block);
  return made ? "" : "cuBLASLt does not take a matrix of " + key.FullText();
}

std::string GpuGemm::State::Choose(int ordinal, const GemmKey& key, GemmPlan* plan) {
  const cublasLtHandle_t handle = plan->handle = handles.at(ordinal);
  const CurrentDevice current(ordinal);
  if (cache == nullptr) {
    cudaDeviceProp properties = {};
    cudaGetDeviceProperties(&properties, ordinal);
    std::string name = properties.name;
    std::replace_if(name.begin(), name.end(), [](char c) { return !isalnum(c); }, '_');
    cache = std::make_unique<TuningCache>(
        folder.empty() ? "" : folder + "/" + name + "-cublasLt" + std::to_string(lt->GetVersion()));
  }
  cublasLtMatmulHeuristicResult_t result;
  if (FromHex(cache->Get(key.Text()), &plan->algo) &&
      lt->MatmulAlgoCheck(handle, plan->op, plan->w, plan->x, plan->c, plan->d, &plan->algo,
                          &result) == CUBLAS_STATUS_SUCCESS &&
      result.workspaceSize <= kWorkspaceBytes) {
    result.algo = plan->algo;
    Fastest(handle, key, {result});
    return "";
  }
  const bool tunes = 2.0 * key.m * key.n * key.k * key.batch >= kTuneFromFlops;

  cublasLtMatmulPreference_t preference;
  bool made = lt->MatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS;
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
  std::vector<cublasLtMatmulHeuristicResult_t> candidates(tunes ? kCandidates : 1);
  int found = 0;
  if (made) {
    lt->MatmulAlgoGetHeuristic(handle, plan->op, plan->w, plan->x, plan->c, plan->d, preference,
                               static_cast<int>(candidates.size()), candidates.data(), &found);
    lt->MatmulPreferenceDestroy(preference);
  }
  candidates.resize(found);
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                  [](const auto& c) { return c.state != CUBLAS_STATUS_SUCCESS; }),
                   candidates.end());
  if (candidates.empty()) return "cuBLASLt has no algorithm for " + key.FullText();
  plan->algo = candidates[0].algo;
  const auto fastest = Fastest(handle, key, candidates);
  if (tunes && fastest) {
    plan->algo = *fastest;
    cache->Put(key.Text(), Hex(plan->algo));
  }
  return "";
}

// Measures on a stream and in memory of its own. Nothing if that cannot be had. Of one
// candidate the kernel is loaded: while another spins, that may wait for that one to end.
std::optional<cublasLtMatmulAlgo_t> GpuGemm::State::Fastest(
    cublasLtHandle_t handle, const GemmKey& key,
    const std::vector<cublasLtMatmulHeuristicResult_t>& candidates) {
  const RelaxedCapture relaxed;
  const auto span = [&](int64_t rows, int64_t ld, int64_t block) {
    return static_cast<size_t>((key.batch - 1) * block + rows * ld);
  };
  // Results next to each other: where they are far apart, there is not so much memory.
  GemmKey near = key;
  near.d_block = key.m * key.ldd;
  near.c_block = key.m * key.ldc;
  const size_t x = span(key.m, key.ldx, key.x_block) * SizeOf(key.in);
  const size_t w = span(key.transposed ? key.n : key.k, key.ldw, key.w_block) * SizeOf(key.in);
  const size_t d = span(key.m, key.ldd, near.d_block) * SizeOf(key.out);
  const size_t c = key.accumulates ? span(key.m, key.ldc, near.c_block) * SizeOf(key.out) : 0;
  if (x + w + c + d > kTuneMostBytes) return {};
  GemmPlan local = {};
  if (!Make(near, &local).empty()) return {};

  cudaStream_t stream;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return {};
  char* memory = nullptr;
  constexpr size_t kAlign = 256;
  const size_t at_w = RoundUp(x, kAlign), at_c = at_w + RoundUp(w, kAlign);
  const size_t at_d = at_c + RoundUp(c, kAlign), workspace = at_d + RoundUp(d, kAlign);
  std::optional<cublasLtMatmulAlgo_t> best;
  if (cudaMallocAsync(reinterpret_cast<void**>(&memory), workspace + kWorkspaceBytes, stream) ==
      cudaSuccess) {
    FillForTuning(memory, at_d, stream);
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    float least = 0;
    for (const auto& candidate : candidates) {
      bool runs = true;
      const auto run = [&] {
        runs = runs && Run(handle, local, candidate.algo, memory, memory + at_w, memory + at_c,
                           memory + at_d, memory + workspace, stream) == CUBLAS_STATUS_SUCCESS;
      };
      run();
      cudaEventRecord(begin, stream);
      for (int i = 0; candidates.size() > 1 && i < kRepeats; ++i) run();
      cudaEventRecord(end, stream);
      float ms = 0;
      if (!runs || cudaEventSynchronize(end) != cudaSuccess ||
          cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) {
        continue;
      }
      if (best && ms >= least) continue;
      best = candidate.algo;
      least = ms;
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaFreeAsync(memory, stream);
  } else {
    cudaGetLastError();  // no memory left is no error of what follows
  }
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return best;
}

cublasStatus_t GpuGemm::State::Run(cublasLtHandle_t handle, const GemmPlan& plan,
                                   const cublasLtMatmulAlgo_t& algo, const void* x, const void* w,
                                   const void* c, void* d, void* workspace,
                                   cudaStream_t stream) const {
  static constexpr float kOne = 1, kZero = 0;
  static constexpr double kWideOne = 1, kWideZero = 0;
  const void* const alpha = plan.wide ? static_cast<const void*>(&kWideOne) : &kOne;
  const void* const zero = plan.wide ? static_cast<const void*>(&kWideZero) : &kZero;
  return lt->Matmul(handle, plan.op, alpha, w, plan.w, x, plan.x, plan.accumulates ? alpha : zero,
                    c, plan.c, d, plan.d, &algo, workspace, kWorkspaceBytes, stream);
}

std::string GpuGemm::Launch(const GpuLane& lane, const GemmPlan& plan, const void* x, const void* w,
                            const void* c, void* d, cudaStream_t stream) {
  const cublasStatus_t status =
      state_->Run(plan.handle, plan, plan.algo, x, w, c, d, lane.workspace, stream);
  return status == CUBLAS_STATUS_SUCCESS ? "" : "cuBLASLt failed: status " + std::to_string(status);
}

}  // namespace jax_overlap
