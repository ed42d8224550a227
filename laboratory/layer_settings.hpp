// The types of VK_EXT_layer_settings that ggml-vulkan.cpp names, for Vulkan headers older than 1.3.272. The extension is
// used only where the user asks for validation, and a driver that does not know the structure passes over it.
#pragma once
#include <vulkan/vulkan_core.h>

#ifndef VK_EXT_layer_settings
#include <vector>

namespace vk {
enum class LayerSettingTypeEXT { eBool32 = 0 };

struct LayerSettingEXT {
    const char * layer;
    const char * setting;
    LayerSettingTypeEXT type;
    uint32_t count;
    const void * values;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : count(static_cast<uint32_t>(settings.size())), settings(settings.data()) {}

    VkStructureType type = static_cast<VkStructureType>(1000496000);
    const void * next = nullptr;
    uint32_t count;
    const LayerSettingEXT * settings;
};
}  // namespace vk
#endif
