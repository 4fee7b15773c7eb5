#include "cuda_emulation.h"

#include <link.h>
#include <pthread.h>
#include <ucontext.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace turnwise::emulation {

dim3 thread_index, block_index, block_size, grid_size;
int64_t atomics = 0;

namespace {

constexpr size_t kStackBytes = 96 << 10;
constexpr int kCanaryBytes = 64;
constexpr unsigned char kCanary = 0xa5, kGarbage = 0xff;  // 0xff: NaN as a float, -1 as an int

struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int64_t block = 0;
    int thread = 0;
    bool done = false, waiting = false;
    Barrier barrier = Barrier::warp;
    int exchanges = 0;  // two slots take turns, so that one barrier per exchange is enough
    uint64_t slot[2] = {0, 0};
};

struct Block {
    std::vector<unsigned char> storage;
    unsigned char* shared = nullptr;  // 16-byte aligned, within storage
};

ucontext_t scheduler;
std::vector<std::unique_ptr<Fibre>> fibres;  // kept between launches for their stacks
std::vector<Block> blocks;
Fibre* current = nullptr;
const std::function<void()>* kernel = nullptr;
std::exception_ptr failure;
Launch running;
int64_t first_block = 0;  // of those that run together
std::mutex one_at_a_time;

struct Range {
    uintptr_t begin = 0, end = 0;
    bool holds(uintptr_t address, size_t bytes) const { return begin <= address && address + bytes <= end; }
};

thread_local std::vector<Range> buffers;  // of the call that this thread makes
thread_local bool launched = false;       // a kernel has run on them
thread_local bool in_kernel = false;      // a fibre runs on this thread

// This module's code, constants and variables.
std::vector<Range> find_module() {
    std::vector<Range> found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* to) {
            std::vector<Range> parts;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto& header = info->dlpi_phdr[i];
                const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
                if (header.p_type == PT_LOAD) parts.push_back({begin, begin + header.p_memsz});
            }
            const auto own = reinterpret_cast<uintptr_t>(&thread_index);
            const bool ours = std::any_of(parts.begin(), parts.end(), [&](const Range& r) { return r.holds(own, 1); });
            if (ours) *static_cast<std::vector<Range>*>(to) = parts;
            return int(ours);
        },
        &found);
    return found;
}

// The stack of the thread that launches, which holds the launch's arguments.
Range find_stack() {
    pthread_attr_t attributes;
    void* begin = nullptr;
    size_t bytes = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &begin, &bytes);
    pthread_attr_destroy(&attributes);
    return {reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(begin) + bytes};
}

[[noreturn]] void refuse(const std::string& reason) {
    throw std::logic_error("CUDA emulation: " + reason);
}

void enter() {
    try {
        (*kernel)();
    } catch (...) {
        failure = std::current_exception();
    }
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

size_t place_of(int64_t block, int thread) {
    return size_t((block - first_block) * running.threads + thread);
}

void resume(Fibre& fibre) {
    current = &fibre;
    thread_index = {unsigned(fibre.thread), 0, 0};
    block_index = {unsigned(fibre.block), 0, 0};
    in_kernel = true;
    swapcontext(&scheduler, &fibre.context);
    in_kernel = false;
    if (failure) std::rethrow_exception(failure);
}

// Releases the fibres of [begin, end) if all of them wait at the same barrier; a thread of a block or grid that has
// returned counts as there, one of a warp does not.
bool release(size_t begin, size_t end, Barrier barrier) {
    bool any = false;
    for (size_t i = begin; i < end; ++i) {
        const Fibre& f = *fibres[i];
        if (f.done) {
            if (barrier == Barrier::warp) return false;
            continue;
        }
        if (!f.waiting || f.barrier != barrier) return false;
        any = true;
    }
    for (size_t i = begin; any && i < end; ++i) fibres[i]->waiting = false;
    return any;
}

bool release_some(size_t count) {
    bool any = false;
    for (size_t i = 0; i < count; i += 32) any |= release(i, i + 32, Barrier::warp);
    const size_t each = size_t(running.threads);
    for (size_t i = 0; i < count; i += each) any |= release(i, i + each, Barrier::block);
    if (running.cooperative) any |= release(0, count, Barrier::grid);
    return any;
}

void prepare_shared(Block& block) {
    block.storage.assign(size_t(running.shared_bytes) + kCanaryBytes + 16, kGarbage);
    const auto address = reinterpret_cast<uintptr_t>(block.storage.data());
    block.shared = block.storage.data() + (16 - address % 16) % 16;
    std::memset(block.shared + running.shared_bytes, kCanary, kCanaryBytes);
}

void check_canaries(const Block& block) {
    for (int i = 0; i < kCanaryBytes; ++i) {
        if (block.shared[running.shared_bytes + i] != kCanary) refuse("a write past the shared memory");
    }
}

void run_together(int64_t first, int64_t count) {
    first_block = first;
    const size_t total = size_t(count * running.threads);
    while (fibres.size() < total) {
        fibres.push_back(std::make_unique<Fibre>());
        fibres.back()->stack.reset(new char[kStackBytes]);
    }
    blocks.resize(size_t(count));
    for (Block& block : blocks) prepare_shared(block);
    for (size_t i = 0; i < total; ++i) {
        Fibre& f = *fibres[i];
        f.block = first + int64_t(i) / running.threads;
        f.thread = int(i % size_t(running.threads));
        f.done = f.waiting = false;
        f.exchanges = 0;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = kStackBytes;
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
    for (bool forward = true;; forward = !forward) {
        size_t ran = 0, done = 0;
        for (size_t k = 0; k < total; ++k) {
            Fibre& f = *fibres[forward ? k : total - 1 - k];
            if (!f.done && !f.waiting) {
                resume(f);
                ++ran;
            }
            done += f.done;
        }
        if (done == total) break;
        if (!release_some(total) && ran == 0) refuse("threads wait at a barrier that others never reach");
    }
    for (const Block& block : blocks) check_canaries(block);
}

}  // namespace

void run(const Launch& launch, const std::function<void()>& body) {
    if (emulated_status() != cudaSuccess) throw std::runtime_error("CUDA: launch failed: emulated");
    std::lock_guard<std::mutex> lock(one_at_a_time);
    if (launch.grid < 1 || launch.grid > INT_MAX) refuse("a grid of " + std::to_string(launch.grid) + " blocks");
    if (launch.threads < 32 || launch.threads > 1024 || launch.threads % 32 != 0) {
        refuse("a block of " + std::to_string(launch.threads) + " threads");
    }
    if (launch.shared_bytes > 227 << 10) refuse("more shared memory than a block can have");
    if (launch.cooperative && launch.grid > kMultiprocessors * kBlocksEach)
        refuse("a cooperative grid that is too large");
    running = launch;
    launched = true;
    kernel = &body;
    failure = nullptr;
    block_size = {unsigned(launch.threads), 1, 1};
    grid_size = {unsigned(launch.grid), 1, 1};
    if (launch.cooperative) {
        run_together(0, launch.grid);
    } else {
        for (int64_t block = 0; block < launch.grid; ++block) run_together(block, 1);
    }
}

void wait(Barrier barrier) {
    if (barrier == Barrier::grid && !running.cooperative) refuse("a grid barrier in a launch that is not cooperative");
    Fibre* self = current;
    self->waiting = true;
    self->barrier = barrier;
    swapcontext(&self->context, &scheduler);
}

void* shared_memory() {
    return blocks[size_t(current->block - first_block)].shared;
}

void publish(const void* value, size_t bytes) {
    Fibre* self = current;
    std::memcpy(&self->slot[self->exchanges % 2], value, bytes);
    ++self->exchanges;
    wait(Barrier::warp);
}

void read_lane(int lane, void* value, size_t bytes) {
    const Fibre& other = *fibres[place_of(current->block, current->thread / 32 * 32 + lane)];
    std::memcpy(value, &other.slot[(current->exchanges - 1) % 2], bytes);
}

void expect_full(unsigned mask) {
    if (mask != 0xffffffffu) refuse("a warp operation for a part of the warp");
}

void allow(const void* data, size_t bytes) {
    if (launched) buffers.clear();
    launched = false;
    const auto begin = reinterpret_cast<uintptr_t>(data);
    if (bytes > 0) buffers.push_back({begin, begin + bytes});
}

// Called before every access of a kernel. Its frames know of no exception here, so the fibre stops without unwinding.
void check_access(uintptr_t address, size_t bytes) {
    if (!in_kernel) return;
    const auto stack = reinterpret_cast<uintptr_t>(current->stack.get());
    if (Range{stack, stack + kStackBytes}.holds(address, bytes)) return;
    const auto shared = reinterpret_cast<uintptr_t>(shared_memory());
    if (Range{shared, shared + size_t(running.shared_bytes)}.holds(address, bytes)) return;
    const auto inside = [&](const Range& range) { return range.holds(address, bytes); };
    if (std::any_of(buffers.begin(), buffers.end(), inside)) return;
    static const std::vector<Range> module = find_module();
    if (std::any_of(module.begin(), module.end(), inside)) return;
    static thread_local const Range host = find_stack();
    if (host.holds(address, bytes)) return;
    // Name the nearest buffer that begins before the access.
    std::string reason = "an access of " + std::to_string(bytes) + " bytes outside every buffer";
    const Range last{shared, shared + size_t(running.shared_bytes) + kCanaryBytes};
    if (last.holds(address, bytes)) reason = "an access past the shared memory";
    const Range* nearest = nullptr;
    for (const Range& buffer : buffers) {
        if (buffer.begin <= address && (nearest == nullptr || nearest->begin < buffer.begin)) nearest = &buffer;
    }
    if (nearest != nullptr) {
        reason += ": " + std::to_string(address - nearest->begin) + " bytes into one of " +
                  std::to_string(nearest->end - nearest->begin);
    }
    reason += ", by thread " + std::to_string(current->thread) + " of block " + std::to_string(current->block);
    failure = std::make_exception_ptr(std::logic_error("CUDA emulation: " + reason));
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

}  // namespace turnwise::emulation

// What the compiler calls before an access, see -fsanitize=kernel-address.
#define TURNWISE_CHECK(bytes)                          \
    void __asan_load##bytes##_noabort(uintptr_t at) {  \
        turnwise::emulation::check_access(at, bytes);  \
    }                                                  \
    void __asan_store##bytes##_noabort(uintptr_t at) { \
        turnwise::emulation::check_access(at, bytes);  \
    }
extern "C" {
TURNWISE_CHECK(1)
TURNWISE_CHECK(2)
TURNWISE_CHECK(4)
TURNWISE_CHECK(8)
TURNWISE_CHECK(16)
void __asan_loadN_noabort(uintptr_t at, size_t bytes) {
    turnwise::emulation::check_access(at, bytes);
}
void __asan_storeN_noabort(uintptr_t at, size_t bytes) {
    turnwise::emulation::check_access(at, bytes);
}
void __asan_handle_no_return() {}
}
