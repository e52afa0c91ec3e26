# libgpukern_ladder.so, the gemm ladder of learn/ladder.md: for the tests and benchmarks of learn/, not installed and not part
# of `all`. The linker takes those of libgpukern's objects that its two real rungs ask for. CMakeLists.txt includes this after
# gk_add_cuda, in a build for both architectures.
file(GLOB ladder_sources CONFIGURE_DEPENDS learn/ladder/*.cu)
set(ladder_hopper ${ladder_sources})
list(FILTER ladder_sources EXCLUDE REGEX "_sm90a\\.cu$")
list(FILTER ladder_hopper INCLUDE REGEX "_sm90a\\.cu$")
gk_cuda_objects(gk_ladder_80 "${gk_cuda_flags_80}" ${ladder_sources})
gk_cuda_objects(gk_ladder_90a "${gk_cuda_flags_90a}" ${ladder_hopper})
gk_log_ptxas(gk_ladder_90a)
add_library(gk_archive STATIC ${gk_object_files})
add_library(gpukern_ladder SHARED $<TARGET_OBJECTS:gk_ladder_80> $<TARGET_OBJECTS:gk_ladder_90a>)
set_target_properties(gk_archive gpukern_ladder PROPERTIES LINKER_LANGUAGE C)
target_link_libraries(gpukern_ladder PRIVATE gk_archive m ${gk_cuda_libraries} ${gk_cuda_runtime})
gk_link_options(gpukern_ladder)
set_target_properties(gk_ladder_80 gk_ladder_90a gk_archive gpukern_ladder PROPERTIES EXCLUDE_FROM_ALL ON)
