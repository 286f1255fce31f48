//! A condition on a call's argument.

use oci_spec::runtime::LinuxSeccompOperator as Operator;

/// A comparison of one argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Condition {
    /// 0 to 5.
    pub(super) argument: u8,
    pub(super) operator: Operator,
    /// For a masked comparison, the mask.
    pub(super) value: u64,
    /// For a masked comparison, the expected result after masking.
    pub(super) value_two: u64,
}
