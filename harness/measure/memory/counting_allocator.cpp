// A counting wrapper around torch's CPU allocator: requested bytes, live and at their peak.
//
// Blocks of the threads that run the model, which say so with acb_count_this_thread, are kept apart from those of all
// others (gloo's workers, whose temporaries are the backend's business and not the model's).
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

// torch makes a tensor of a number wherever an operator is called with one, and dispatch modes call it again
constexpr size_t kScalarBytes = 16;

struct Count {
  int64_t live = 0;
  int64_t peak = 0;
  int64_t window_peak = 0;  // a second peak, for the memory of one operator
  int64_t allocations = 0;  // of more than a scalar
  int64_t allocated = 0;    // bytes of all of them

  void add(int64_t bytes) {
    live += bytes;
    peak = std::max(peak, live);
    window_peak = std::max(window_peak, live);
  }
};

struct Block {
  int64_t bytes;
  bool is_model;
};

std::mutex mutex;
std::unordered_map<void*, Block> blocks;
Count model;
Count backend;
c10::Allocator* wrapped = nullptr;
thread_local bool this_thread_is_model = false;

void forget(void* data) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = blocks.find(data);
  if (found == blocks.end()) {
    return;
  }
  (found->second.is_model ? model : backend).add(-found->second.bytes);
  blocks.erase(found);
}

void release(void* data) {
  if (data != nullptr) {
    forget(data);  // before the block is free: another thread may get the same address
    wrapped->raw_deallocate(data);
  }
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // raw_allocate, which torch uses too, needs a pointer that is its own context
    void* data = bytes == 0 ? nullptr : wrapped->raw_allocate(bytes);
    if (data != nullptr) {
      std::lock_guard<std::mutex> guard(mutex);
      blocks[data] = {static_cast<int64_t>(bytes), this_thread_is_model};
      Count& count = this_thread_is_model ? model : backend;
      count.add(static_cast<int64_t>(bytes));
      if (bytes > kScalarBytes) {
        count.allocations += 1;
        count.allocated += static_cast<int64_t>(bytes);
      }
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

// never destroyed: blocks may outlive every static object of the process
CountingAllocator& counting() {
  static auto* allocator = new CountingAllocator();
  return *allocator;
}

constexpr uint8_t kPriority = 200;  // above torch's own; equal priority may replace it again

}  // namespace

extern "C" {

// Returns 0 if the allocator in place has no raw interface and cannot be wrapped.
int acb_install() {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current == &counting()) {
    return 1;
  }
  if (current->raw_deleter() == nullptr) {
    return 0;
  }
  wrapped = current;
  c10::SetCPUAllocator(&counting(), kPriority);
  return 1;
}

int acb_is_installed() { return c10::GetCPUAllocator() == &counting() ? 1 : 0; }

void acb_uninstall() {
  if (c10::GetCPUAllocator() == &counting()) {
    c10::SetCPUAllocator(wrapped, kPriority);
  }
}

void acb_count_this_thread(int as_model) { this_thread_is_model = as_model != 0; }

void acb_reset_peaks() {
  std::lock_guard<std::mutex> guard(mutex);
  model.peak = model.live;
  backend.peak = backend.live;
}

void acb_reset_window() {
  std::lock_guard<std::mutex> guard(mutex);
  model.window_peak = model.live;
}

void acb_read(int64_t* live, int64_t* peak, int64_t* window_peak, int64_t* allocations, int64_t* allocated,
              int64_t* backend_live, int64_t* backend_peak) {
  std::lock_guard<std::mutex> guard(mutex);
  *live = model.live;
  *peak = model.peak;
  *window_peak = model.window_peak;
  *allocations = model.allocations;
  *allocated = model.allocated;
  *backend_live = backend.live;
  *backend_peak = backend.peak;
}
}
