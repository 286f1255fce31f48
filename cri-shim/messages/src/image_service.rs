//! ImageService.

use crate::service::service;
use crate::{
    ImageFsInfoRequest, ImageFsInfoResponse, ImageStatusRequest, ImageStatusResponse,
    ListImagesRequest, ListImagesResponse, PullImageRequest, PullImageResponse, RemoveImageRequest,
    RemoveImageResponse, StreamImagesRequest, StreamImagesResponse,
};

service! {
    /// Images.
    ///
    /// What is not implemented answers that, without a message.
    ImageService, ImageServiceServer, ImageServiceClient, "runtime.v1.ImageService";
    /// Lists images.
    list_images: "ListImages", ListImagesRequest => ListImagesResponse;
    /// Lists images in several messages.
    stream_images: "StreamImages", StreamImagesRequest => stream StreamImagesResponse;
    /// Tells whether an image is there, and what it is.
    image_status: "ImageStatus", ImageStatusRequest => ImageStatusResponse;
    /// Fetches an image from its registry.
    pull_image: "PullImage", PullImageRequest => PullImageResponse;
    /// Removes an image. It may be called again.
    remove_image: "RemoveImage", RemoveImageRequest => RemoveImageResponse;
    /// Tells how much space images and containers take.
    image_fs_info: "ImageFsInfo", ImageFsInfoRequest => ImageFsInfoResponse;
}
