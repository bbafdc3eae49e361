// psum on the CPU: the FFI handler around the algorithms of psum.h.
#include "ops/psum.h"

#include <memory>
#include <string>
#include <utility>

#include "core/host_op.h"
#include "ops/handlers.h"

namespace jax_overlap {
namespace {

namespace ffi = xla::ffi;

struct PsumSite {
  static ffi::TypeId id;

  HostSite host;
  PsumAlgorithm algorithm;
};

ffi::TypeId PsumSite::id = {};

// Bytes in a chunk, for which the slots of a channel have room. What is read and
// written in place needs no slots and is not cut.
constexpr size_t kOneShotChunk = 16 << 10;
constexpr size_t kNvrarChunk = 64 << 10;
constexpr size_t kUncut = size_t{1} << 40;

// f(algorithm, elements in a chunk) with the class that implements the choice.
template <class T, class F>
void WithAlgorithm(PsumAlgorithm algorithm, F f) {
  switch (algorithm) {
    case PsumAlgorithm::kOneShot: return f(OneShot<T>{}, kOneShotChunk / sizeof(T));
    case PsumAlgorithm::kTwoShot: return f(TwoShot<T, Steps::kDirect>{}, kUncut);
    case PsumAlgorithm::kNvrar: return f(Nvrar<T, Steps::kDirect>{}, kNvrarChunk / sizeof(T));
  }
}

class PsumProgram : public HostProgram {
 public:
  PsumProgram(const PsumSite& site, HostTeam& team, ffi::DataType dtype,
              std::unique_ptr<HostCall> call)
      : HostProgram(site.host, team, std::move(call)), algorithm_(site.algorithm), dtype_(dtype) {}

  std::string Prepare() override {
    std::string error;
    Dispatch([&](auto algorithm, auto, size_t capacity) {
      const Channel::Key key{static_cast<int>(algorithm_), static_cast<int>(dtype_), capacity};
      channel_ =
          team().Take(key, PsumChannelBytes<decltype(algorithm)>(Shape(0), capacity), &error);
    });
    return error;
  }
  void Finish() override { team().Give(std::move(channel_)); }

  void RunTask(int rank, Waiter& waiter) override {
    Dispatch([&](auto algorithm, auto element, size_t capacity) {
      RunLeaves<decltype(algorithm), decltype(element)>(rank, capacity, waiter);
    });
  }

  // In place, two_shot has nothing to wait for.
  bool waits() const override { return algorithm_ != PsumAlgorithm::kTwoShot; }

  bool wants_help() const override {
    size_t elements = 0;
    for (size_t count : counts()) elements += count;
    return elements * ffi::ByteWidth(dtype_) * site().ranks() >= kHelpFromBytes;
  }

 private:
  // f(algorithm, a value of the element type, elements in a chunk)
  template <class F>
  void Dispatch(F f) {
    WithElementType(dtype_, [&](auto element) {
      WithAlgorithm<decltype(element)>(
          algorithm_, [&](auto algorithm, size_t capacity) { f(algorithm, element, capacity); });
    });
  }

  template <class AlgorithmOf, class T>
  void RunLeaves(int rank, size_t capacity, Waiter& waiter) {
    const int ranks = site().ranks();
    for (size_t leaf = 0; leaf < counts().size(); ++leaf) {
      const void* const* inputs = call().inputs.data() + leaf * ranks;
      void* const* outputs = call().outputs.data() + leaf * ranks;
      HostLink<true> link(rank, ranks, channel_->heaps.data(), inputs, outputs, waiter, deadline());
      RunPsum<AlgorithmOf>(OneThread{}, link, Shape(rank), channel_->heaps[rank], capacity,
                           static_cast<const T*>(inputs[rank]), counts()[leaf],
                           static_cast<T*>(outputs[rank]));
      if (link.failed()) return SetStatus(rank, link.status());
    }
  }

  TeamShape Shape(int rank) const { return {rank, site().ranks(), site().node_size()}; }

  const PsumAlgorithm algorithm_;
  const ffi::DataType dtype_;
  std::unique_ptr<Channel> channel_;
};

ffi::ErrorOr<std::unique_ptr<PsumSite>> Instantiate(int64_t abi, std::string_view axes,
                                                    ffi::Span<const int64_t> groups,
                                                    int64_t group_size, int64_t node_size,
                                                    int64_t algorithm) {
  auto site = std::make_unique<PsumSite>();
  site->algorithm = static_cast<PsumAlgorithm>(algorithm);
  const std::string error =
      site->host.Init("jax_overlap.psum", abi, axes, groups, group_size, node_size);
  if (!error.empty()) return ffi::Unexpected(ffi::Error::InvalidArgument(error));
  return site;
}

}  // namespace

JO_DEFINE_HANDLER(Psum, "jax_overlap.psum", PsumSite, PsumProgram, Instantiate,
                  .Attr<int64_t>("algorithm"))

}  // namespace jax_overlap
