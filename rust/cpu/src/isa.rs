//! Instruction sets, and how a kernel is run with one.
#![expect(unsafe_code, reason = "runs kernels whose instructions the caller has")]

use crate::vectors::Kernel;
#[cfg(target_arch = "x86_64")]
use crate::x86::{Avx2, Avx512};

/// The vector instructions that a call uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// Instructions that every CPU of the target has.
    Portable,
    /// AVX2, FMA and the conversions of float16.
    Avx2,
    /// AVX-512 with the F, BW, DQ and VL parts.
    Avx512,
    /// AVX-512 with dot products of bfloat16 and of bytes.
    Avx512BFloat16,
    /// NEON, of every `AArch64` CPU.
    Neon,
}

impl InstructionSet {
    /// All sets, the best of an architecture last.
    pub const ALL: [Self; 5] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512BFloat16, Self::Neon];

    /// The best set that this CPU has.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|set| set.is_available()).unwrap_or(Self::Portable)
    }

    /// Whether this CPU has the set.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 = || {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
                    && std::arch::is_x86_feature_detected!("f16c")
            };
            let has_avx512 = || {
                has_avx2()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vl")
            };
            match self {
                Self::Portable => true,
                Self::Avx2 => has_avx2(),
                Self::Avx512 => has_avx512(),
                Self::Avx512BFloat16 => {
                    has_avx512()
                        && std::arch::is_x86_feature_detected!("avx512bf16")
                        && std::arch::is_x86_feature_detected!("avx512vnni")
                }
                Self::Neon => false,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable || cfg!(target_arch = "aarch64") && self == Self::Neon
        }
    }

    /// Runs a kernel with these instructions.
    ///
    /// # Safety
    /// The CPU has the instructions, and the conditions of the kernel hold.
    pub(crate) unsafe fn run<K: Kernel>(self, kernel: K) {
        // SAFETY: the caller's promise.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            match self {
                Self::Avx2 => return kernel.run_avx2(),
                Self::Avx512 => return kernel.run_avx512(),
                Self::Avx512BFloat16 => return kernel.run_avx512_bf16(),
                Self::Portable | Self::Neon => {}
            }
            #[cfg(target_arch = "aarch64")]
            if self == Self::Neon {
                return kernel.run::<crate::neon::Neon>();
            }
            kernel.run::<crate::portable::Portable>();
        }
    }
}

/// A kernel with the instructions of a set.
///
/// Methods of each kernel, not functions: the compiler divides a crate among cores by module, and
/// these belong to the module of the kernel.
#[cfg(target_arch = "x86_64")]
trait X86Kernel: Kernel + Sized {
    /// Runs it with AVX2, FMA and F16C.
    ///
    /// # Safety
    /// As the kernel's; the CPU has all three.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run_avx2(self) {
        // SAFETY: the caller's promise.
        unsafe { self.run::<Avx2>() }
    }

    /// Runs it with AVX-512.
    ///
    /// # Safety
    /// As the kernel's; the CPU has the instructions.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run_avx512(self) {
        // SAFETY: the caller's promise.
        unsafe { self.run::<Avx512<false>>() }
    }

    /// Runs it with AVX-512 and its dot products of bfloat16 and of bytes.
    ///
    /// # Safety
    /// As the kernel's; the CPU has the instructions.
    #[target_feature(
        enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni"
    )]
    unsafe fn run_avx512_bf16(self) {
        // SAFETY: the caller's promise.
        unsafe { self.run::<Avx512<true>>() }
    }
}

#[cfg(target_arch = "x86_64")]
impl<K: Kernel> X86Kernel for K {}
