#include "core/parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace turnwise {
namespace {

constexpr int kSpins = 4000;  // some 20 microseconds: longer than the gap between two passes of one op

struct Job {
    Job(int parts, const std::function<void(int)>& body) : parts(parts), body(body), left(parts) {}

    void work() {
        for (int part = next.fetch_add(1); part < parts; part = next.fetch_add(1)) {
            body(part);
            left.fetch_sub(1, std::memory_order_release);
        }
    }
    bool done() const { return left.load(std::memory_order_acquire) == 0; }

    const int parts;
    const std::function<void(int)>& body;  // alive until done(): the caller waits for that
    std::atomic<int> next{0};
    std::atomic<int> left;
};

class Pool {
  public:
    void run(int parts, const std::function<void(int)>& body) {
        auto job = std::make_shared<Job>(parts, body);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (int(workers_.size()) < parts - 1) {
                workers_.emplace_back([this] { serve(); });
                workers_.back().detach();
            }
            job_ = job;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        job->work();
        for (int spins = 0; !job->done(); ++spins) {
            if (spins > kSpins) std::this_thread::yield();
        }
    }

    std::mutex busy;  // held by the one caller that may use the workers

  private:
    void serve() {
        uint64_t seen = 0;
        for (;;) {
            for (int spins = 0; spins < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spins) {
            }
            std::shared_ptr<Job> job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
                seen = generation_.load(std::memory_order_relaxed);
                job = job_;
            }
            job->work();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::shared_ptr<Job> job_;
    std::atomic<uint64_t> generation_{0};
    std::vector<std::thread> workers_;
};

struct OwnedPool {
    explicit OwnedPool(pid_t owner) : owner(owner) {}

    const pid_t owner;
    Pool pool;
};

// Never destroyed, since its threads may outlive static destructors; a forked child has no threads and needs its own.
// No lock: a fork while another thread held it would leave the child waiting for ever.
Pool& pool() {
    static std::atomic<OwnedPool*> current{nullptr};
    const pid_t self = getpid();
    OwnedPool* found = current.load(std::memory_order_acquire);
    while (found == nullptr || found->owner != self) {
        OwnedPool* mine = new OwnedPool(self);
        if (current.compare_exchange_strong(found, mine, std::memory_order_acq_rel)) return mine->pool;
        delete mine;  // another thread was quicker; no worker has started
    }
    return found->pool;
}

// ---- The process's own OpenMP threads -----------------------------------------------------------------------------
// PyTorch's workers go on spinning for a while after each of its operations. Threads of our own would have to share the
// cores with them, so we ask them to do the work, by the entry that compilers call for a parallel region.
using ParallelRegion = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

#if defined(__linux__)

int keep_runtime(dl_phdr_info* info, size_t, void* found) {
    std::string& best = *static_cast<std::string*>(found);
    const std::string name = info->dlpi_name == nullptr ? "" : info->dlpi_name;
    const std::string file = name.substr(name.rfind('/') + 1);
    const bool runtime =
        file.rfind("libgomp", 0) == 0 || file.rfind("libiomp5", 0) == 0 || file.rfind("libomp", 0) == 0;
    // Of several, the one that came with PyTorch.
    if (runtime && (best.empty() || name.find("/torch") != std::string::npos)) best = name;
    return 0;
}

ParallelRegion find_parallel_region() {
    std::string name;
    dl_iterate_phdr(keep_runtime, &name);
    void* library = name.empty() ? nullptr : dlopen(name.c_str(), RTLD_NOLOAD | RTLD_NOW);
    return library == nullptr ? nullptr : reinterpret_cast<ParallelRegion>(dlsym(library, "GOMP_parallel"));
}

#else

ParallelRegion find_parallel_region() {
    return nullptr;
}

#endif

std::atomic<bool> forked{false};  // a child has none of the parent's threads, and OpenMP does not know

ParallelRegion parallel_region() {
    static const ParallelRegion found = [] {
        pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
        return find_parallel_region();
    }();
    return forked.load(std::memory_order_relaxed) ? nullptr : found;
}

}  // namespace

void run_parts(int parts, const std::function<void(int)>& body) {
    const ParallelRegion region = parts > 1 ? parallel_region() : nullptr;
    if (region != nullptr) {
        static std::mutex busy;
        std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
        if (lock.owns_lock()) {
            Job job(parts, body);
            region([](void* data) { static_cast<Job*>(data)->work(); }, &job, unsigned(parts), 0);
            return;
        }
    } else if (parts > 1) {
        Pool& workers = pool();
        std::unique_lock<std::mutex> lock(workers.busy, std::try_to_lock);
        if (lock.owns_lock()) {
            workers.run(parts, body);
            return;
        }
    }
    for (int part = 0; part < parts; ++part) body(part);
}

}  // namespace turnwise
