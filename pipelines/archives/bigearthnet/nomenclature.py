"""Class names of the archives; their order defines the class indices."""

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
"""The 19 classes of BigEarthNet in alphabetical order, as the v2.0 metadata lists a patch's labels.

Other software orders the names by their CORINE code, so an index has no meaning without its list of names.

Source: Sumbul et al., "BigEarthNet-MM", 2021 (the classes); Clasen et al., "reBEN", 2024 (v2.0).
"""

_CORINE_TO_19 = {
    "Continuous urban fabric": "Urban fabric",
    "Discontinuous urban fabric": "Urban fabric",
    "Industrial or commercial units": "Industrial or commercial units",
    "Road and rail networks and associated land": None,
    "Port areas": None,
    "Airports": None,
    "Mineral extraction sites": None,
    "Dump sites": None,
    "Construction sites": None,
    "Green urban areas": None,
    "Sport and leisure facilities": None,
    "Non-irrigated arable land": "Arable land",
    "Permanently irrigated land": "Arable land",
    "Rice fields": "Arable land",
    "Vineyards": "Permanent crops",
    "Fruit trees and berry plantations": "Permanent crops",
    "Olive groves": "Permanent crops",
    "Pastures": "Pastures",
    "Annual crops associated with permanent crops": "Permanent crops",
    "Complex cultivation patterns": "Complex cultivation patterns",
    "Land principally occupied by agriculture, with significant areas of natural vegetation": (
        "Land principally occupied by agriculture, with significant areas of natural vegetation"
    ),
    "Agro-forestry areas": "Agro-forestry areas",
    "Broad-leaved forest": "Broad-leaved forest",
    "Coniferous forest": "Coniferous forest",
    "Mixed forest": "Mixed forest",
    "Natural grassland": "Natural grassland and sparsely vegetated areas",
    "Moors and heathland": "Moors, heathland and sclerophyllous vegetation",
    "Sclerophyllous vegetation": "Moors, heathland and sclerophyllous vegetation",
    "Transitional woodland/shrub": "Transitional woodland, shrub",
    "Beaches, dunes, sands": "Beaches, dunes, sands",
    "Bare rock": None,
    "Sparsely vegetated areas": "Natural grassland and sparsely vegetated areas",
    "Burnt areas": None,
    "Inland marshes": "Inland wetlands",
    "Peatbogs": "Inland wetlands",
    "Salt marshes": "Coastal wetlands",
    "Salines": "Coastal wetlands",
    "Intertidal flats": None,
    "Water courses": "Inland waters",
    "Water bodies": "Inland waters",
    "Coastal lagoons": "Marine waters",
    "Estuaries": "Marine waters",
    "Sea and ocean": "Marine waters",
}

BIGEARTHNET_43 = tuple(_CORINE_TO_19)
"""The 43 classes of CORINE Land Cover 2018, level 3, that occur in BigEarthNet v1.0, by their CORINE code."""

TO_19 = tuple(None if name is None else BIGEARTHNET_19.index(name) for name in _CORINE_TO_19.values())
"""Index in `BIGEARTHNET_19` of each of the 43 classes, or None: 11 classes have no counterpart.

Source: Sumbul et al., "BigEarthNet-MM", 2021.
"""
