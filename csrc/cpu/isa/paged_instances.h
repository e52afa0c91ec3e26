/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_instances: the products and the softmax of a unit, instance by instance. Included by
 * paged_attn.c alone. */
/* One copy of the loops per dtype that the ISA serves and run of 4, 2 or 1 lanes: together the runs
 * cover any number. */
typedef struct products {
    void (*dots)(int64_t head_dim, const cell *q, int64_t q_head, const key_rows *k, fetch *next,
                 float *s, int64_t s_head);
    void (*weighted_rows)(int64_t head_dim_v, const cell *p, int64_t p_head, const key_rows *v,
                          fetch *next, float *o, int64_t o_head, int64_t o_step);
    void (*softmax)(const paged_job *job, const paged_lane *lane, float scale, int64_t j0,
                    int64_t n, float *s, cell *p, float *o);
} products;

#define PRODUCTS(type, dtype, lanes)                                                               \
    static void __attribute__((noinline)) dots_##type##_##lanes(                                   \
        int64_t head_dim, const cell *q, int64_t q_head, const key_rows *k, fetch *next, float *s, \
        int64_t s_head) {                                                                          \
        dots(lanes, dtype, head_dim, q, q_head, k, next, s, s_head);                               \
    }                                                                                              \
    static void __attribute__((noinline)) weighted_rows_##type##_##lanes(                          \
        int64_t head_dim_v, const cell *p, int64_t p_head, const key_rows *v, fetch *next,         \
        float *o, int64_t o_head, int64_t o_step) {                                                \
        weighted_rows(lanes, dtype, head_dim_v, p, p_head, v, next, o, o_head, o_step);            \
    }
#define SOFTMAX(lanes)                                                                    \
    static __attribute__((noinline)) void softmax_##lanes(                                \
        const paged_job *job, const paged_lane *lane, float scale, int64_t j0, int64_t n, \
        float *s, cell *p, float *o) {                                                    \
        softmax(lanes, job, lane, scale, j0, n, s, p, o);                                 \
    }
SOFTMAX(1)
SOFTMAX(2)
SOFTMAX(4)
#define PRODUCTS_OF(type, dtype) \
    PRODUCTS(type, dtype, 1) PRODUCTS(type, dtype, 2) PRODUCTS(type, dtype, 4)
#define PRODUCTS_ROW(type)                                            \
    {                                                                 \
        {dots_##type##_1, weighted_rows_##type##_1, softmax_1},       \
            {dots_##type##_2, weighted_rows_##type##_2, softmax_2}, { \
            dots_##type##_4, weighted_rows_##type##_4, softmax_4      \
        }                                                             \
    }
PRODUCTS_OF(bf16, GK_BF16)
static const products bf16_products[] = PRODUCTS_ROW(bf16);
#if PAIR == 1
PRODUCTS_OF(f32, GK_F32)
PRODUCTS_OF(f16, GK_F16)
static const products f32_products[] = PRODUCTS_ROW(f32), f16_products[] = PRODUCTS_ROW(f16);
#else
#define f32_products bf16_products
#define f16_products bf16_products
#endif
