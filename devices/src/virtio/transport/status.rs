//! The device status field (§2.1) and the order in which a driver may set its bits.

/// The device status field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status(u8);

impl Status {
    /// The driver has noticed the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The driver knows how to drive the device.
    pub const DRIVER: u8 = 2;
    /// The driver is set up.
    pub const DRIVER_OK: u8 = 4;
    /// Feature negotiation is complete.
    pub const FEATURES_OK: u8 = 8;
    /// The device has met an error that it cannot recover from.
    pub const DEVICE_NEEDS_RESET: u8 = 64;
    /// The driver has given up on the device.
    pub const FAILED: u8 = 128;

    const ALL: u8 = Self::ACKNOWLEDGE | Self::DRIVER | Self::DRIVER_OK | Self::FEATURES_OK;

    /// The field's bits.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Returns a field with these bits, if a driver can have set them.
    pub(super) fn from_bits(bits: u8) -> Option<Self> {
        let known = bits & !Self::FAILED;
        matches!(known, 0 | 1 | 3 | 11 | 15).then_some(Self(bits))
    }

    /// The driver may still negotiate features.
    #[must_use]
    pub fn negotiating(self) -> bool {
        self.0 & Self::ALL == Self::ACKNOWLEDGE | Self::DRIVER
    }

    /// The driver may set up its queues: features are negotiated, `DRIVER_OK` is not set yet.
    #[must_use]
    pub fn configuring_queues(self) -> bool {
        self.0 & Self::ALL == Self::ACKNOWLEDGE | Self::DRIVER | Self::FEATURES_OK
    }

    /// `DRIVER_OK` is set.
    #[must_use]
    pub fn live(self) -> bool {
        self.0 & Self::DRIVER_OK != 0
    }

    /// The driver gave up.
    #[must_use]
    pub fn failed(self) -> bool {
        self.0 & Self::FAILED != 0
    }

    /// Returns what a driver's write of `value` requests. Bits may be added one step at a time, in
    /// the order of §3.1.1, and never removed except by a reset.
    #[must_use]
    pub(super) fn change(self, value: u8) -> StatusChange {
        if value == 0 {
            return StatusChange::Reset;
        }
        match (self.failed(), value & Self::FAILED != 0) {
            (true, true) => return StatusChange::Stay,
            // §2.1.1: after FAILED a driver resets the device before it tries again.
            (true, false) => return StatusChange::Illegal,
            (false, true) => return StatusChange::Fail,
            (false, false) => {}
        }
        // NEEDS_RESET belongs to the device: what the driver writes there is ignored.
        let next = value & !Self::DEVICE_NEEDS_RESET;
        let known = self.0 & Self::ALL;
        match (known, next) {
            (a, b) if a == b => StatusChange::Stay,
            (0, 1) | (1, 3) => StatusChange::Advance(Self(next)),
            // Many drivers set both at the same time.
            (0, 3) => StatusChange::Advance(Self(next)),
            (3, 11) => StatusChange::Features(Self(next)),
            (11, 15) => StatusChange::Start(Self(next)),
            _ => StatusChange::Illegal,
        }
    }

    pub(super) fn with_failed(self) -> Self {
        Self(self.0 | Self::FAILED)
    }
}

/// The effect of a write to the status register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatusChange {
    /// All state goes back to its initial values.
    Reset,
    /// The driver gave up: the device stops.
    Fail,
    /// No change.
    Stay,
    /// Only the field changes.
    Advance(Status),
    /// The field changes if the features are acceptable.
    Features(Status),
    /// The field changes and the device starts.
    Start(Status),
    /// Out of order: ignored.
    Illegal,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_the_specification_is_kept() {
        let mut status = Status::default();
        for (value, expect_negotiating, expect_queues) in
            [(1, false, false), (3, true, false), (11, false, true)]
        {
            match status.change(value) {
                StatusChange::Advance(next) | StatusChange::Features(next) => status = next,
                other => panic!("{value}: {other:?}"),
            }
            assert_eq!(status.negotiating(), expect_negotiating);
            assert_eq!(status.configuring_queues(), expect_queues);
        }
        assert!(matches!(status.change(15), StatusChange::Start(s) if s.live()));
    }

    #[test]
    fn skipped_and_cleared_bits_are_illegal() {
        assert_eq!(Status(0).change(15), StatusChange::Illegal);
        assert_eq!(Status(3).change(15), StatusChange::Illegal);
        assert_eq!(Status(3).change(7), StatusChange::Illegal);
        assert_eq!(Status(15).change(11), StatusChange::Illegal);
        assert_eq!(Status(15).change(16), StatusChange::Illegal);
        assert_eq!(Status(15).change(0), StatusChange::Reset);
        assert_eq!(Status(15).change(15 | 64), StatusChange::Stay);
        assert_eq!(Status(1).change(129), StatusChange::Fail);
        assert_eq!(Status(129).change(129), StatusChange::Stay);
        for value in [1, 3, 11, 15, 64] {
            assert_eq!(Status(129).change(value), StatusChange::Illegal);
            assert_eq!(Status(139).change(value), StatusChange::Illegal);
        }
        assert_eq!(Status(139).change(0), StatusChange::Reset);
    }
}
