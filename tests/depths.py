"""Images of more than 8 bits: slices like those of a CT scanner, and files of each format that holds such values."""

import struct
import zlib

import numpy as np
from PIL import Image

#: What a scanner adds to Hounsfield units, so that they are not negative in 12 bits.
OFFSET = 1024


def slices(count, rng, lesion, size=24):
    """12-bit slices (count, size, size) of tissue of -50 +- 15 HU; ``lesion`` adds a disk of +60 HU somewhere."""
    values = rng.normal(-50, 15, (count, size, size)) + OFFSET
    if lesion:
        centres = rng.uniform(6, size - 6, (count, 2, 1, 1))
        rows, columns = np.mgrid[:size, :size]
        values[(rows - centres[:, 0]) ** 2 + (columns - centres[:, 1]) ** 2 < 25] += 60
    return values.round().astype(np.uint16)


def tree(root, write, suffix, **splits):
    """Class folders of slices: ``splits`` says how many of a class are in each, such as ``train=600``."""
    rng = np.random.default_rng(0)
    for split, count in splits.items():
        for lesion, name in enumerate(("healthy", "lesion")):
            (root / split / name).mkdir(parents=True)
            for number, values in enumerate(slices(count, rng, lesion)):
                write(root / split / name / f"{number}{suffix}", values)
    return root


def npz(path, root):
    """The images of the class folders in an .npz file."""
    arrays = {}
    for split in ("train", "test"):
        files = sorted(root.glob(f"{split}/*/*.png"))
        arrays[f"{split}_images"] = np.stack([np.array(Image.open(file)) for file in files])
        arrays[f"{split}_labels"] = np.array([int(file.parent.name == "lesion") for file in files])
    np.savez(path, **arrays)
    return path


def pillow(path, values, **options):
    Image.fromarray(values).save(path, **options)


def tiff(path, values, order="<", white_is_zero=False):
    """An uncompressed TIFF file of one strip, grey or RGB; Pillow writes only a few of the types that it reads."""
    values = values.astype(values.dtype.newbyteorder(order))
    channels = (*values.shape, 1)[2]
    kind, bits = {"u": 1, "i": 2, "f": 3}[values.dtype.kind], values.dtype.itemsize * 8
    photometric = 2 if channels == 3 else int(not white_is_zero)
    tags = [(256, values.shape[1]), (257, values.shape[0]), (258, bits), (259, 1), (262, photometric)]
    tags += [(273, 256), (277, channels), (278, values.shape[0]), (279, values.nbytes), (339, kind)]
    head = struct.pack(f"{order}2sHIH", b"II" if order == "<" else b"MM", 42, 8, len(tags))
    for tag, value in tags:
        if tag == 258 and channels == 3:
            head += struct.pack(f"{order}HHII", tag, 3, 3, 200)
        else:
            head += struct.pack(f"{order}HHII", tag, 4, 1, value)
    head = (head + bytes(4)).ljust(200, b"\0") + struct.pack(f"{order}3H", bits, bits, bits)
    path.write_bytes(head.ljust(256, b"\0") + values.tobytes())


def pnm(path, values, maximum):
    """A PGM or PPM file."""
    header = b"P%d\n%d %d\n%d\n" % (values.ndim + 3, values.shape[1], values.shape[0], maximum)
    path.write_bytes(header + values.astype(">u2").tobytes())


def png(path, values):
    """A PNG file of 16 bits: (H, W, C) is grey with alpha, RGB or RGBA."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width, channels = values.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), values.astype(">u2").reshape(height, -1).view(np.uint8)], 1)
    header = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes())) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def dicom(path, values, slope=1, intercept=-OFFSET, photometric="MONOCHROME2", **more):
    """A DICOM file of stored values; with the defaults they become Hounsfield units."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    data = FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    data.SOPClassUID, data.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    data.Rows, data.Columns = values.shape[:2]
    data.SamplesPerPixel, data.PhotometricInterpretation = (*values.shape, 1)[2], photometric
    if values.ndim == 3:
        data.PlanarConfiguration = 0
    bits = values.dtype.itemsize * 8
    data.BitsAllocated, data.BitsStored, data.HighBit = bits, min(bits, 12), min(bits, 12) - 1
    data.PixelRepresentation = int(values.dtype.kind == "i")
    data.RescaleSlope, data.RescaleIntercept = slope, intercept
    for name, value in more.items():
        setattr(data, name, value)
    data.PixelData = values.tobytes()
    data.save_as(path, enforce_file_format=True)
