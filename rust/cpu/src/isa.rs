//! Instruction sets, and how a kernel is run with one.
#![expect(unsafe_code, reason = "runs kernels whose instructions the caller has")]

use crate::portable::Portable;
use crate::vectors::{Instructions, Kernel};
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
    /// The same, and AMX for products of bfloat16.
    Amx,
    /// NEON, of every `AArch64` CPU.
    Neon,
}

impl InstructionSet {
    /// All sets, the best of an architecture last.
    pub const ALL: [Self; 6] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512BFloat16, Self::Amx, Self::Neon];

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
            let has_dot = || {
                has_avx512()
                    && std::arch::is_x86_feature_detected!("avx512bf16")
                    && std::arch::is_x86_feature_detected!("avx512vnni")
            };
            match self {
                Self::Portable => true,
                Self::Avx2 => has_avx2(),
                Self::Avx512 => has_avx512(),
                Self::Avx512BFloat16 => has_dot(),
                Self::Amx => has_dot() && crate::x86::amx::is_available(),
                Self::Neon => false,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable || cfg!(target_arch = "aarch64") && self == Self::Neon
        }
    }

    /// Whether it has dot products of bfloat16, which are faster than those of float32.
    pub(crate) fn has_dots_of_bfloat16(self) -> bool {
        matches!(self, Self::Avx512BFloat16 | Self::Amx)
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
                Self::Avx2 => return Avx2::call(kernel),
                Self::Avx512 => return Avx512::<false>::call(kernel),
                // Products of bfloat16 choose AMX themselves.
                Self::Avx512BFloat16 | Self::Amx => return Avx512::<true>::call(kernel),
                Self::Portable | Self::Neon => {}
            }
            #[cfg(target_arch = "aarch64")]
            if self == Self::Neon {
                return crate::neon::Neon::call(kernel);
            }
            Portable::call(kernel);
        }
    }
}
