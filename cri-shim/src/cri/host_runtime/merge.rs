//! Answers of two runtimes as one.
//!
//! An encoded message with repeated fields only, after another one, is the message with the
//! elements of both.

use std::collections::{BTreeMap, BTreeSet};

use bytes::{Bytes, BytesMut};
use podvisor_cri_messages::{Image, ListImagesResponse, ListMetricDescriptorsResponse};
use prost::Message;
use tonic::Status;

use super::message::decode;

/// Merges two messages of repeated fields.
pub(super) fn concatenated(own: &Bytes, hosts: &Bytes) -> Bytes {
    let mut both = BytesMut::with_capacity(own.len() + hosts.len());
    both.extend_from_slice(own);
    both.extend_from_slice(hosts);
    both.freeze()
}

/// Merges two lists of images: one that both runtimes have is listed once, with the names of both.
pub(super) fn images(own: &Bytes, hosts: &Bytes) -> Result<Bytes, Status> {
    let own: ListImagesResponse = decode(own)?;
    let hosts: ListImagesResponse = decode(hosts)?;
    let mut images = own.images;
    let own_images = images.iter().enumerate();
    let places: BTreeMap<String, usize> = own_images
        .map(|(place, image)| (image.id.clone(), place))
        .collect();
    for image in hosts.images {
        match places.get(&image.id) {
            Some(&place) => add(&mut images[place], image),
            None => images.push(image),
        }
    }
    Ok(ListImagesResponse { images }.encode_to_vec().into())
}

/// Adds what the other runtime knows of an image: it takes the space of both, and is kept if one
/// keeps it.
fn add(image: &mut Image, hosts: Image) {
    let tags = hosts.repo_tags.into_iter();
    let new_tags: Vec<_> = tags.filter(|tag| !image.repo_tags.contains(tag)).collect();
    image.repo_tags.extend(new_tags);
    let digests = hosts.repo_digests.into_iter();
    let new_digests: Vec<_> = digests
        .filter(|digest| !image.repo_digests.contains(digest))
        .collect();
    image.repo_digests.extend(new_digests);
    image.size = image.size.saturating_add(hosts.size);
    image.pinned |= hosts.pinned;
}

/// Merges two lists of metrics, whose names must be unique: the node's own go first.
pub(super) fn descriptors(own: &Bytes, hosts: &Bytes) -> Result<Bytes, Status> {
    let mut own: ListMetricDescriptorsResponse = decode(own)?;
    let hosts: ListMetricDescriptorsResponse = decode(hosts)?;
    let known = own.descriptors.iter();
    let known: BTreeSet<_> = known.map(|metric| metric.name.clone()).collect();
    let new = hosts.descriptors.into_iter();
    let new = new.filter(|metric| !known.contains(&metric.name));
    own.descriptors.extend(new);
    Ok(own.encode_to_vec().into())
}
