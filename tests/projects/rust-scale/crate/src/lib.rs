//! `scaled(out, input, factor)` for TVM FFI, by its C interface (tvm/ffi/c_api.h).

use std::ffi::{c_char, c_int, c_void};

const FLOAT: i32 = 3;
const DL_TENSOR: i32 = 7;
const TENSOR: i32 = 70;
const OBJECT_HEADER: usize = 24;

#[repr(C)]
#[derive(Clone, Copy)]
union Value {
    float: f64,
    pointer: *mut c_void,
}

#[repr(C)]
pub struct Any {
    kind: i32,
    padding: u32,
    value: Value,
}

#[repr(C)]
struct DLTensor {
    data: *mut u8,
    device: [i32; 2],
    dimensions: i32,
    dtype: [u8; 4],
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

extern "C" {
    fn TVMFFIErrorSetRaisedFromCStr(kind: *const c_char, message: *const c_char);
}

/// Return the elements of an argument; None for another type than a tensor of float32 on the CPU.
unsafe fn elements<'a>(argument: &Any) -> Option<&'a mut [f32]> {
    let tensor = match argument.kind {
        DL_TENSOR => argument.value.pointer,
        TENSOR => argument.value.pointer.cast::<u8>().add(OBJECT_HEADER).cast(),
        _ => return None,
    } as *const DLTensor;
    if (*tensor).dtype != [2, 32, 1, 0] || (*tensor).device[0] != 1 {
        return None;
    }
    let count = (0..(*tensor).dimensions as usize).map(|n| *(*tensor).shape.add(n)).product::<i64>();
    let first = (*tensor).data.add((*tensor).byte_offset as usize) as *mut f32;
    Some(std::slice::from_raw_parts_mut(first, count as usize))
}

#[no_mangle]
pub unsafe extern "C" fn __tvm_ffi_scaled(_: *mut c_void, args: *const Any, count: i32, _: *mut Any) -> c_int {
    let args = std::slice::from_raw_parts(args, count as usize);
    if let [out, input, factor] = args {
        if let (Some(out), Some(input), FLOAT) = (elements(out), elements(input), factor.kind) {
            scale_rows::scale(out, input, factor.value.float as f32);
            return 0;
        }
    }
    TVMFFIErrorSetRaisedFromCStr(b"TypeError\0".as_ptr().cast(), b"expected float32\0".as_ptr().cast());
    -1
}
