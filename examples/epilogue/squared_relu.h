/* SPDX-License-Identifier: BSD-3-Clause */
/* out = scale[row] max(sum, 0)^2, for float32 scale [M]. NaN stays NaN. */
#include <gpukern_epilogue.h>

struct squared_relu {
    gk_per_row scale;
    GK_ARGUMENTS(scale)
    GK_FINISH float finish(float sum, int row, int) const {
        const float positive = sum < 0 ? 0 : sum;
        return scale[row] * positive * positive;
    }
};
