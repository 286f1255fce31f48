//! Messages of the control queues (§5.3.6.2).

/// The number of bytes of a message before a name.
pub(super) const LEN: usize = 8;

/// The longest name of a port.
pub(super) const MAX_NAME: usize = 64;

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Event {
    /// The driver has (or has not) set itself up.
    DeviceReady = 0,
    /// There is such a port.
    PortAdd = 1,
    /// The driver has set up the port, or could not.
    PortReady = 3,
    /// The other side has opened or closed the port.
    PortOpen = 6,
    /// The port's name follows.
    PortName = 7,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) port: u32,
    /// `None` if a driver sends something else.
    pub(super) event: Option<Event>,
    pub(super) is_set: bool,
}

impl Message {
    pub(super) fn decode([a, b, c, d, e, f, g, h]: [u8; LEN]) -> Self {
        let event = match u16::from_le_bytes([e, f]) {
            0 => Some(Event::DeviceReady),
            3 => Some(Event::PortReady),
            6 => Some(Event::PortOpen),
            _ => None,
        };
        Self {
            port: u32::from_le_bytes([a, b, c, d]),
            event,
            is_set: u16::from_le_bytes([g, h]) != 0,
        }
    }

    /// Returns a message to the driver.
    pub(super) fn encode(port: u32, event: Event, is_set: bool) -> [u8; LEN] {
        let [a, b, c, d] = port.to_le_bytes();
        let [e, f] = (event as u16).to_le_bytes();
        [a, b, c, d, e, f, u8::from(is_set), 0]
    }
}
