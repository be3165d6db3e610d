"""Word lists of ours, from which the needles' keys and values and the generated filler are drawn.

Source: ours; the paper does not state its names, codes or phrases. Within one list no word is part of another
word, so that counting a value in a text by substring counts that value only.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# --- the seven needle clients ---

SURNAMES = _words(
    """Abbott Barlow Calder Dawson Ellery Foster Garner Hobbs Ingram Jarvis Keller Lowell Mercer Norris
    Osborne Palmer Quincy Ramsey Sutton Tanner Upton Vaughn Walker Yates Ashford Becker Conway
    Draper Everett Fletcher Gibson Harmon Irving Jensen Kendall Langley Morrow Nolan Ogden Porter
    Radley Sawyer Thorne Vernon Whitman Archer Benton Crosby Dalton Emerson"""
)

MISSIONS = _words(
    """Orion Vega Altair Rigel Lyra Cygnus Draco Phoenix Hydra Pegasus Perseus Corvus Aquila Delphi
    Argo Hermes Apollo Athena Triton Icarus Juno Vesta Ceres Pallas Titan Oberon Ariel Miranda
    Callisto Europa Ganymede Calypso Halcyon Meridian Zenith Solstice Equinox Aurora Eclipse Nimbus
    Borealis Cascade Summit Horizon Polaris Antares Castor Electra"""
)

PHRASE_FIRST = _words(
    """amber silver crimson golden hidden frozen silent broken ancient distant gentle hollow ivory
    jagged lonely marble narrow orange patient quiet rapid scarlet tender velvet winter yellow
    copper dusty emerald faded grand humble iron jolly kindly lucky misty noble olive proud rustic
    steady thirsty urban vivid woven cloudy bitter"""
)

PHRASE_SECOND = _words(
    """falcon harbor meadow lantern canyon orchard thunder anchor badger castle dragon engine feather
    glacier hammer island jungle kettle ladder mirror needle ocean pepper quarry ribbon saddle
    temple umbrella valley wagon zephyr bridge candle desert ember forest garden hornet insect
    jacket kernel lizard magnet nectar oyster pillar rocket spider"""
)

SECRET_KEYS = _words(
    """violet bronze maple cedar granite cobalt saffron indigo walnut coral basil jasper topaz willow
    juniper onyx ginger poppy clover barley quartz sable tulip hazel linen mustard nickel pewter
    russet thistle turquoise vanilla almond birch cactus daisy fennel garnet heather iris jade
    laurel mango nutmeg opal peach rosewood sienna"""
)

CODEWORDS = _words(
    """acrobat balloon cabbage dolphin elephant fiddler giraffe hamster igloo jaguar kangaroo lobster
    monkey necklace octopus penguin quilt raccoon scooter teapot unicorn violin walrus yogurt zebra
    apricot banjo cookie donkey eagle flamingo gorilla helmet icicle jellyfish kitten lemon muffin
    napkin otter parrot rabbit salmon tiger trumpet vulture waffle acorn bagel camel daffodil
    eggplant ferret goblin hedgehog iguana juggler koala llama mermaid noodle ostrich pancake quail
    radish sandal turnip vampire weasel antler biscuit cricket dumpling falafel gazelle harpsichord
    jackal lettuce mustang nugget papaya rooster squirrel toucan wombat bison cobra dinghy ferry
    gondola hippo jigsaw locket moose nutcracker pelican rhubarb skunk tortoise"""
)

MONTHS = _words("January February March April May June July August September October November December")

# --- the public practice task ---

FIRST_NAMES = _words(
    """Alice Bruno Clara Diego Emma Felix Greta Hugo Ines Jonas Karin Louis Marta Nadia Oscar Paula
    Quentin Rosa Simon Tessa Ulrich Vera Wanda Xavier Yusuf Zoe Anton Bianca Cyrus Daphne Edgar
    Flora Gavin Heidi Igor Jasmin Kofi Leila Mateo Noemi Olga Pedro Rafael Sven Tomas Ursula Viktor
    Wilma Yara Zeno"""
)

TOWNS = _words(
    """Abermoor Brackwell Caldstone Dunmarsh Eastvale Farrowby Glenhurst Highbourne Kestrelton
    Larkfield Millhaven Netherby Oakhollow Pinecroft Queensbeck Ravenholt Stonebrook Thornbury
    Underhill Wexcombe Yarrowgate Ashmere Birchdale Coldwater Driftwick Elmstead Foxglen Greywater
    Hartmoor Kingsford Longmead"""
)

VESSELS = _words(
    """Albatross Bluebell Cormorant Dauntless Evergreen Fairwind Gallant Harrier Intrepid Kittiwake
    Leander Marigold Nightingale Osprey Petrel Resolute Seagull Tempest Valiant Wanderer"""
)

THINGS = _words(
    """cabinet suitcase bookcase wardrobe tractor freezer piano boiler trolley telescope printer
    bicycle generator barrel aquarium carpet sofa statue fountain windmill cupboard sledge
    greenhouse furnace elevator typewriter canoe hammock mailbox tricycle"""
)

THING_ADJECTIVES = _words("old new large small blue green white black heavy spare rented wooden")

COLOURS = _words("black white brown grey pink purple teal beige maroon navy tan lilac")

ANIMALS = _words(
    """horse goat swan crow beaver lynx heron mole toad viper bull stork mink wolf seal trout finch
    lamb hound panther"""
)

PLAIN_WORDS = _words(
    """button curtain pencil blanket ceiling drawer pillow window bottle basket carrot tunnel mountain
    sugar butter chimney compass cellar fossil gravel hinge kitchen lobby mortar oven parcel quiver
    ruler staple tavern vinegar wrench zipper anvil bucket corner dagger fringe gutter hostel
    inkwell jersey kiosk lumber mallet notebook opera pulley raisin shovel velcro wallet attic
    bonfire cotton doorbell"""
)
