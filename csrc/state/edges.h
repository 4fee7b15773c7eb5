// Finds what differs between two versions without a walk over what they share: it knows the references of one version
// by the container that they lead to. It moves to another version by what differs there.
#pragma once

#include <unordered_map>
#include <vector>

#include "state/heap.h"

namespace turnwise::state {

class Edges {
  public:
    // The containers that differ, or lead to one that does, with the places of the items of `ours` that lead there.
    using Marks = std::unordered_map<SlotIndex, std::vector<size_t>>;
    Marks differing(const Heap& ours, const Heap& theirs);
    // Keeps the references of `heap` in place of the version before.
    void move_to(const Heap& heap);

  private:
    struct Edge {
        SlotIndex parent;
        uint32_t place;  // of the item in the parent
        uint32_t next;   // the next edge to the same child, plus 1; 0: none
    };
    void learn(const Heap& heap);
    void learn(SlotIndex slot, const Node* node, const Node* known);
    void add(Value value, SlotIndex parent, size_t place);

    Heap::Table known_;            // a version whose references all have an edge; its dicts have entries alone
    std::vector<uint32_t> first_;  // by child: its first edge, plus 1; 0: none
    std::vector<Edge> edges_;      // those of other versions too, until there are too many of them
    size_t most_ = 0;              // with more edges, all are learned again
};

}  // namespace turnwise::state
