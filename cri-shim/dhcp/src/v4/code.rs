//! Numbers of options (RFC 2132).

pub(super) const PAD: u8 = 0;
pub(super) const MASK: u8 = 1;
pub(super) const ROUTER: u8 = 3;
pub(super) const NAME_SERVER: u8 = 6;
pub(super) const HOST_NAME: u8 = 12;
pub(super) const DOMAIN: u8 = 15;
pub(super) const MTU: u8 = 26;
pub(super) const REQUESTED_ADDRESS: u8 = 50;
pub(super) const LEASE_TIME: u8 = 51;
pub(super) const OVERLOAD: u8 = 52;
pub(super) const MESSAGE_TYPE: u8 = 53;
pub(super) const SERVER: u8 = 54;
pub(super) const PARAMETERS: u8 = 55;
pub(super) const MESSAGE: u8 = 56;
pub(super) const MAX_SIZE: u8 = 57;
pub(super) const RENEWAL_TIME: u8 = 58;
pub(super) const REBINDING_TIME: u8 = 59;
pub(super) const CLIENT_ID: u8 = 61;
pub(super) const MACHINE_ID: u8 = 97;
pub(super) const SEARCH: u8 = 119;
pub(super) const ROUTES: u8 = 121;
/// The number that Windows had for routes before they had an RFC.
pub(super) const ROUTES_MICROSOFT: u8 = 249;
pub(super) const END: u8 = 255;
