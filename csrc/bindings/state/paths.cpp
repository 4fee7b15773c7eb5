#include "bindings/state/paths.h"

#include <algorithm>
#include <unordered_map>

namespace turnwise::state {

std::optional<std::vector<PathStep>> find_path(const Heap& heap,
                                               const std::function<bool(Value value, PyObject* key)>& matches) {
    const Value root = heap.root();
    if (root.empty()) return std::nullopt;
    if (matches(root, nullptr)) return std::vector<PathStep>{};
    if (!root.is_slot()) return std::nullopt;
    struct Reached {
        SlotIndex parent;  // the container that reached it first; kNoSlot for the root
        PathStep step;     // its place there
    };
    std::unordered_map<SlotIndex, Reached> reached{{root.slot(), {kNoSlot, {}}}};
    std::vector<SlotIndex> open{root.slot()};
    std::optional<Reached> found;
    // Breadth first. Each container is opened once, from the container that reached it first.
    for (size_t at = 0; at < open.size() && !found; ++at) {
        const SlotIndex slot = open[at];
        const auto visit = [&](Value value, PyObject* key, size_t index) {
            if (found) return;
            const Reached here{slot, {key, index}};
            if (matches(value, key)) {
                found = here;
            } else if (value.is_slot() && reached.emplace(value.slot(), here).second) {
                open.push_back(value.slot());
            }
        };
        // Visit the values of the container in order.
        const Node* node = heap.at(slot);
        size_t index = 0;
        if (node->kind == Kind::Dict) {
            static_cast<const DictNode*>(node)->entries.for_each_chunk([&](const Entry* entries, size_t count) {
                for (size_t i = 0; i < count; ++i) {
                    if (entries[i].key) visit(entries[i].value, object_of(entries[i].key), 0);
                }
            });
        } else {
            node->for_each_value([&](Value value) { visit(value, nullptr, index++); });
        }
    }
    if (!found) return std::nullopt;
    // Back from the value to the root.
    std::vector<PathStep> path{found->step};
    for (SlotIndex parent = found->parent; parent != root.slot(); parent = reached.at(parent).parent) {
        path.push_back(reached.at(parent).step);
    }
    std::reverse(path.begin(), path.end());
    return path;
}

}  // namespace turnwise::state
