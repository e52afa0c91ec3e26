# gpukern_add_epilogue(target NAME op HEADER file [NAMESPACE namespace])
#
# Builds a library with gemm and your own epilogue: torch.ops.<namespace>.<op>(a, b, arguments). The
# header defines struct <op> (docs/epilogue.md). The default namespace is the target's name.
#
# The library contains gemm's CUDA kernels, compiled with the epilogue inside. On CUDA it needs
# neither libgpukern nor the PyTorch plugin. On the CPU it calls gpukern::gemm.
#
# Your project must enable the languages C and CXX, and CUDA if the op is to run on GPUs.
# GPUKERN_EPILOGUE_ARCHS lists the GPUs: 80 (with PTX for later GPUs), 90a, or both. Set
# Python_EXECUTABLE to a Python with torch >= 2.10, or GPUKERN_TORCH_INCLUDE and GPUKERN_TORCH_LIB to
# torch's folders.

set(GPUKERN_EPILOGUE_ARCHS "80;90a" CACHE STRING "GPUs that a library of an epilogue serves: 80 (with PTX for later ones), 90a, or both")

# Finds the folders of torch's headers and of libtorch.so. torch is located, not imported, because an
# import takes seconds.
function(gk_epilogue_torch include lib)
  if(NOT GPUKERN_TORCH_INCLUDE OR NOT GPUKERN_TORCH_LIB)
    find_package(Python 3.10 QUIET COMPONENTS Interpreter)
    if(Python_EXECUTABLE)
      execute_process(COMMAND "${Python_EXECUTABLE}" -c
                      "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
                      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    endif()
    if(NOT Python_EXECUTABLE OR failed OR NOT EXISTS "${folder}/include/torch/csrc/stable/library.h")
      message(FATAL_ERROR " gpukern: no torch >= 2.10 found for ${Python_EXECUTABLE}; pass -DPython_EXECUTABLE= one that has it")
    endif()
    set(${include} "${folder}/include" PARENT_SCOPE)
    set(${lib} "${folder}/lib" PARENT_SCOPE)
  else()
    set(${include} "${GPUKERN_TORCH_INCLUDE}" PARENT_SCOPE)
    set(${lib} "${GPUKERN_TORCH_LIB}" PARENT_SCOPE)
  endif()
endfunction()

function(gpukern_add_epilogue target)
  cmake_parse_arguments(PARSE_ARGV 1 own "" "NAME;HEADER;NAMESPACE" "")
  if(NOT own_NAME OR NOT own_HEADER OR own_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR " gpukern: expected gpukern_add_epilogue(target NAME op HEADER file [NAMESPACE namespace])")
  endif()
  if(NOT own_NAMESPACE)
    set(own_NAMESPACE "${target}")
  endif()
  foreach(word IN ITEMS "${own_NAME}" "${own_NAMESPACE}")
    if(NOT word MATCHES "^[A-Za-z_][A-Za-z0-9_]*$")
      message(FATAL_ERROR " gpukern: '${word}' is no name of an op or a namespace: letters, digits and _ only")
    endif()
  endforeach()
  get_filename_component(header "${own_HEADER}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
  if(NOT EXISTS "${header}")
    message(FATAL_ERROR " gpukern: there is no header ${header}")
  endif()
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if(NOT "C" IN_LIST languages OR NOT "CXX" IN_LIST languages)
    message(FATAL_ERROR " gpukern: gpukern_add_epilogue needs the languages C and CXX in project()")
  endif()
  gk_epilogue_torch(torch_include torch_lib)

  # The repository and an installed package have csrc/ and ops/ beside the folder of this file.
  get_filename_component(csrc "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../csrc" ABSOLUTE)
  get_filename_component(ops "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../ops" ABSOLUTE)
  set(sources "${ops}/epilogue/op.cpp" "${ops}/namespace.cpp" "${csrc}/api/gemm.c" "${csrc}/cpu/features.c")
  foreach(name checks contents overlap status types)
    list(APPEND sources "${csrc}/core/${name}.c")
  endforeach()
  set(with_cuda 0)
  if("CUDA" IN_LIST languages)
    set(with_cuda 1)
    find_package(CUDAToolkit REQUIRED)
    foreach(name core/gemm_problem core/invariant core/prefer core/sm_limit cuda/host/described
            cuda/product/gemm/sm90_plan cuda/product/gemm/sm80_plan epilogue/plan)
      list(APPEND sources "${csrc}/${name}.c")
    endforeach()
    set(kernels host/device host/tensormap product/gemm/gemm_sm80)
    if("90a" IN_LIST GPUKERN_EPILOGUE_ARCHS)
      list(APPEND kernels product/gemm/gemm_sm90a product/gemm/gemm_pingpong_sm90a
           product/gemm/gemm_swapab_sm90a product/gemm/gemm_realign_sm90a)
    endif()
    foreach(name IN LISTS kernels)
      set(flags "-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]")
      if(name MATCHES "_sm90a$")
        set(flags "-gencode=arch=compute_90a,code=sm_90a")
      elseif(NOT "80" IN_LIST GPUKERN_EPILOGUE_ARCHS)
        set(flags "-gencode=arch=compute_80,code=sm_90")
      endif()
      set_source_files_properties("${csrc}/cuda/${name}.cu" PROPERTIES COMPILE_OPTIONS "${flags};--expt-relaxed-constexpr")
      list(APPEND sources "${csrc}/cuda/${name}.cu")
    endforeach()
  endif()

  add_library(${target} MODULE ${sources})
  set_target_properties(${target} PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON
                        CUDA_STANDARD 17 CUDA_ARCHITECTURES OFF C_VISIBILITY_PRESET hidden CXX_VISIBILITY_PRESET hidden
                        CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON SKIP_BUILD_RPATH ON)
  set_property(SOURCE ${sources} APPEND PROPERTY OBJECT_DEPENDS "${header}")
  target_include_directories(${target} PRIVATE "${csrc}" "${csrc}/epilogue" "${ops}"
                             $<TARGET_PROPERTY:gpukern::gpukern,INTERFACE_INCLUDE_DIRECTORIES>)
  target_include_directories(${target} SYSTEM PRIVATE "${torch_include}")
  target_compile_definitions(${target} PRIVATE GPUKERN_EPILOGUE=${own_NAME} "GPUKERN_EPILOGUE_HEADER=\"${header}\""
                             GPUKERN_NAMESPACE=${own_NAMESPACE} TORCH_TARGET_VERSION=0x020a000000000000 USE_CUDA)
  # NaN and inf keep their meaning: never -ffast-math.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-fno-fast-math>)
  target_link_libraries(${target} PRIVATE m -Wl,--no-as-needed "${torch_lib}/libtorch.so" -Wl,--as-needed)
  if(with_cuda)
    target_compile_definitions(${target} PRIVATE GPUKERN_HAS_CUDA=1 $<$<BOOL:$<FILTER:${GPUKERN_EPILOGUE_ARCHS},INCLUDE,90a>>:GPUKERN_HAS_SM90A=1>)
    set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CXX)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  endif()
  if(NOT APPLE)
    # This library and libgpukern may be loaded into one process. Each must call its own gk_
    # functions.
    target_link_options(${target} PRIVATE LINKER:-Bsymbolic-functions)
  endif()
endfunction()
