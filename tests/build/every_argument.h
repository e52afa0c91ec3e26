/* SPDX-License-Identifier: BSD-3-Clause */
/* An epilogue with every kind of argument, for tests/build/test_epilogue.py. */
#include <gpukern_epilogue.h>

struct every_argument {
    gk_per_row scale;
    gk_per_column shift;
    float most;
    gk_per_element gate;
    GK_ARGUMENTS(scale, shift, most, gate)
    GK_FINISH float finish(float sum, int row, int column) const {
        const float x = fmaf(scale[row], sum, shift[column]);
        return (x > most ? most : x) * gate(row, column);
    }
};
