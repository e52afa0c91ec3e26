// SPDX-License-Identifier: BSD-3-Clause
// distributed.cpp: sum_over_ranks, the sum of x over several GPUs. One kernel computes it through
// mailboxes in memory that all of these GPUs can access (gpukern.h).
#include <algorithm>

#include "gpukern.h"
#include "run.h"

namespace gk {
namespace {

struct SumOverRanks {
    Tensor x;             // float32
    WrittenTensor out;    // x's shape
    TensorList mailboxes; // one for each rank, mapped into this GPU's address space, of equal size
    int64_t rank;
    double timeout_s;

    static constexpr const char *name = "sum_over_ranks";
};

void sum_over_ranks(SumOverRanks &op) {
    const char *const name = SumOverRanks::name;
    Reader read(name, "x, out", true);
    read(op.x);
    read(op.out);
    std::vector<void *> addresses;
    int64_t least = INT64_MAX;
    for (Tensor &mailbox : op.mailboxes.items()) {
        mailbox.read_form(name);
        mailbox.read_data(name, true);
        addresses.push_back(mailbox.view.data);
        least = std::min<int64_t>(least, mailbox.numel() * gk_dtype_bytes(mailbox.view.dtype));
    }
    gk_sum_over_ranks_args args{};
    args.size = sizeof args;
    args.x = op.x.view;
    args.out = op.out.view;
    args.mailboxes = addresses.data();
    args.mailbox_bytes = addresses.empty() ? 0 : static_cast<size_t>(least);
    args.rank = static_cast<int32_t>(op.rank);
    args.num_ranks = static_cast<int32_t>(addresses.size());
    args.timeout_s = op.timeout_s;
    Call call(name, read.device, "x");
    call.done(gk_sum_over_ranks(call.context(), &args));
}

void implement(Library &m) { m.impl("sum_over_ranks", boxed<sum_over_ranks>); }
void implement_shapes(Library &) {}

} // namespace
} // namespace gk

GK_IMPLEMENT()
