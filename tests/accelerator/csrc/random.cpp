#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <random>

#include "streams.h"

namespace late {
namespace {

class LateGenerator final : public c10::GeneratorImpl {
 public:
  explicit LateGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kLate, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(std::uint64_t seed) override { words_ = {seed, 0}; }
  void set_offset(std::uint64_t offset) override { words_[1] = offset; }
  std::uint64_t get_offset() const override { return words_[1]; }
  std::uint64_t current_seed() const override { return words_[0]; }

  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return current_seed();
  }

  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == sizeof(words_), "late: a generator's state has ", sizeof(words_), " bytes");
    std::memcpy(words_.data(), state.data(), sizeof(words_));
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({std::int64_t(sizeof(words_))}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), words_.data(), sizeof(words_));
    return state.getIntrusivePtr();
  }

  at::Generator next() {
    std::seed_seq mixed{words_[0] & 0xFFFFFFFF, words_[0] >> 32, words_[1] & 0xFFFFFFFF, words_[1] >> 32};
    ++words_[1];
    std::array<std::uint32_t, 2> halves;
    mixed.generate(halves.begin(), halves.end());
    return at::detail::createCPUGenerator(std::uint64_t(halves[0]) << 32 | halves[1]);
  }

 private:
  LateGenerator* clone_impl() const override {
    auto* copy = new LateGenerator(device().index());
    copy->words_ = words_;
    return copy;
  }

  std::array<std::uint64_t, 2> words_{c10::default_rng_seed_val, 0};  // the seed, and how many draws there were
};

}  // namespace

at::Generator make_generator(c10::DeviceIndex device) {
  if (device < 0) device = current_device();
  check_device(device);
  return at::make_generator<LateGenerator>(device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* made = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int index = 0; index < device_count(); ++index) generators->push_back(make_generator(c10::DeviceIndex(index)));
    return generators;
  }();
  if (device < 0) device = current_device();
  check_device(device);
  return (*made)[std::size_t(device)];
}

at::Generator next_draw(c10::DeviceIndex device, const std::optional<at::Generator>& given) {
  const bool is_given = given && given->defined();
  at::Generator generator = is_given ? *given : default_generator(device);
  auto* ours = dynamic_cast<LateGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours, "Expected a 'late' device type for generator but found '", generator.device().type(), "'");
  const std::lock_guard lock(ours->mutex_);
  return ours->next();
}

}  // namespace late
