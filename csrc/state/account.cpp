#include "state/account.h"

namespace turnwise::state {

void Account::add(const Heap& heap) {
    unshared_ +=
        heap.table().bytes(*this, [&](const Place& place) { return place.node() ? of_node(place.node()) : 0; });
}

size_t Account::of_node(const Node* node) {
    if (const size_t* sum = known(node)) return *sum;
    const auto nothing = [](const auto&) { return size_t{0}; };
    // The node itself, and the blocks of its arrays.
    size_t own = 0, below = 0;
    switch (node->kind) {
        case Kind::Dict: {
            const auto* dict = static_cast<const DictNode*>(node);
            own = sizeof(DictNode);
            below = dict->entries.bytes(*this, nothing) + dict->index.bytes(*this, nothing);
            break;
        }
        case Kind::List:
            own = sizeof(ListNode);
            below = static_cast<const ListNode*>(node)->items.bytes(*this, nothing);
            break;
        case Kind::Tuple:
            own = sizeof(TupleNode);
            below = static_cast<const TupleNode*>(node)->items.bytes(*this, nothing);
            break;
        case Kind::Tokens:
            own = sizeof(TokensNode);
            below = static_cast<const TokensNode*>(node)->tokens.bytes(*this, nothing);
            break;
        case Kind::Opaque:
            own = sizeof(OpaqueNode);
            break;
    }
    ++containers_;
    learn(node, own + below, own);
    return own + below;
}

}  // namespace turnwise::state
