/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_sums.h: the old name of a part of gpukern.h, kept for one version. */
#include "gpukern.h"
