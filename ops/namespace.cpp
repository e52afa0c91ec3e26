// SPDX-License-Identifier: BSD-3-Clause
// namespace.cpp: the namespace of the ops, torch.ops.<namespace>. It is the only object file of
// ops/ that differs between plugins of different names.
#include "errors.h"

#define STRINGIFY_(x) #x
#define STRINGIFY(x) STRINGIFY_(x)

namespace gk {
const char *const ops_namespace = STRINGIFY(GPUKERN_NAMESPACE);
} // namespace gk
