"""Class names of the archives; their order fixes what a class index means."""

BIGEARTHNET_19 = (
    "Agro-forestry areas",
    "Arable land",
    "Beaches, dunes, sands",
    "Broad-leaved forest",
    "Coastal wetlands",
    "Complex cultivation patterns",
    "Coniferous forest",
    "Industrial or commercial units",
    "Inland waters",
    "Inland wetlands",
    "Land principally occupied by agriculture, with significant areas of natural vegetation",
    "Marine waters",
    "Mixed forest",
    "Moors, heathland and sclerophyllous vegetation",
    "Natural grassland and sparsely vegetated areas",
    "Pastures",
    "Permanent crops",
    "Transitional woodland, shrub",
    "Urban fabric",
)
"""The 19 classes of BigEarthNet, alphabetical: the order in which the v2.0 metadata lists a patch's labels.

Other software orders the same names by their CORINE code, so an index means nothing without its list of names.

Source: Sumbul et al., "BigEarthNet-MM", 2021 (the classes); Clasen et al., "reBEN", 2024 (v2.0).
"""
